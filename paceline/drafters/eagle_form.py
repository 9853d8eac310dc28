"""What an EAGLE checkpoint holds, whoever wrote it: the originals, SpecForge, vLLM's conversions, speculators.

Their configs spell the same facts differently, leave some out and contradict their tensors. Here they become one
`Form`. Sizes and biases come from tensors; what no tensor shows (how heads are cut, epsilon, rotary base, which states,
where norms stand) comes from the config, its publisher's defaults, or the user. Knows names; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from paceline.drafters import speculators
from paceline.drafters.base import FINAL, Target
from paceline.drafters.checkpoint import Checkpoint
from paceline.errors import CheckpointError, OptionError
from paceline.kernels.ops import Heads
from paceline.models.config import RopeConfig, is_whole, read_activation, read_number, read_rope

STRIPPED = r"model\."  # in front of names, once or twice
FIRST_LAYERS = ("midlayer.", "layers.0.", "transformer.")
FUSIONS = ("fc.", "fusion_fc.", "projection.")
EMBEDDING_NORMS = ("enorm.weight", "embedding_layernorm.weight")
LAST_NORMS = ("norm.weight", "pre_lm_head_layernorm.weight")
OLD_STATE_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")


@dataclass(frozen=True)
class Overrides:
    """What a user says against the file; None: the file is believed."""

    layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None


@dataclass(frozen=True)
class Form:
    third: bool  # EAGLE-3: attention reads embedding and state side by side
    hidden: int
    wide: int  # of the feed-forward
    heads: Heads
    num_layers: int
    eps: float
    activation: str
    rope: RopeConfig
    states: tuple[int, ...]  # the target's boundaries it reads, in the order it reads them
    first: str  # prefix of the first layer's names
    fusion: str | None  # of the linear that brings its input to `hidden`; None: there is none
    embedding_norm: str | None  # EAGLE-1: of the embedding before the fusion
    state_norm: str | None  # EAGLE-1: of the state before the fusion
    first_norm: bool  # EAGLE-1: the first layer norms its input
    last_norm: str | None  # before the vocabulary head
    state_norms: tuple[str, ...]  # EAGLE-3: one for each state before the fusion
    joint_norm: str | None  # EAGLE-3: one over all of them
    norm_before_residual: bool
    norm_output: bool  # what it feeds itself is normed
    mask: int | None  # P-EAGLE: the token of places that are not known yet


def read(checkpoint: Checkpoint, target: Target, given: Overrides) -> Form:
    """The checkpoint's form, once it fits the target."""
    fields = spelled_out(checkpoint.config)
    first = _find(checkpoint, FIRST_LAYERS, "self_attn.q_proj.weight")
    rows, columns = checkpoint.matrix(f"{first}self_attn.q_proj.weight")
    hidden, _ = checkpoint.matrix(f"{first}self_attn.o_proj.weight")
    if columns not in (hidden, 2 * hidden):
        raise CheckpointError(
            f"{checkpoint.label}: attention reads {columns} values, but EAGLE's reads {hidden}, EAGLE-3's {2 * hidden}"
        )
    third = columns == 2 * hidden
    fusion = next((name for name in FUSIONS if checkpoint.has(f"{name}weight")), None)
    layers = checkpoint.names(r"layers\.\d+\.self_attn\.q_proj\.weight")
    flag = given.norm_before_residual
    states = _states(checkpoint, fields, target, given, fusion) if third else (FINAL,)
    return Form(
        third=third,
        hidden=hidden,
        wide=checkpoint.matrix(f"{first}mlp.up_proj.weight")[0],
        heads=_heads(checkpoint, fields, first, rows),
        num_layers=max(1, len(layers) + (first != "layers.0.")),
        eps=read_number(fields, "rms_norm_eps", 1e-6),
        activation=read_activation(fields.get("hidden_act") or "silu"),
        rope=read_rope(SimpleNamespace(**{"max_position_embeddings": 2048, **fields})),
        states=states,
        first=first,
        fusion=fusion,
        embedding_norm=None if third else _there(checkpoint, EMBEDDING_NORMS),
        state_norm=None if third else _there(checkpoint, ("hnorm.weight",)),
        first_norm=not third and bool(fields.get("layernorms") or fields.get("skip_prenorm") is False),
        last_norm=_last_norm(checkpoint, fields, third),
        state_norms=_state_norms(checkpoint, fields, len(states)) if third else (),
        joint_norm="input_norm.weight" if third and _says(checkpoint, fields, "norm_before_fc", "input_norm") else None,
        norm_before_residual=bool(fields["norm_before_residual"] if flag is None else flag),
        norm_output=bool(fields.get("norm_output")) or not third,
        mask=_mask(checkpoint, fields, target),
    )


def spelled_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's facts on one level, whether they stand there, under `model`, or under speculators' layer config."""
    fields = {**speculators.layer_fields(config), **config}
    for nested in ("model", "eagle_config"):
        inner = config.get(nested)
        fields |= inner if isinstance(inner, dict) else {}
    # Where it is not said, the originals mean no; vLLM reads speculators' own files as yes.
    fields.setdefault("norm_before_residual", speculators.is_ours(config))
    if fields["norm_before_residual"] is None:
        fields["norm_before_residual"] = False
    return fields


def _heads(checkpoint: Checkpoint, fields: Mapping[str, Any], first: str, rows: int) -> Heads:
    """Counts from tensors; how wide a head is stands in no matrix, unless heads are normed."""
    norm = f"{first}self_attn.q_norm.weight"
    width: Any = fields.get("head_dim")
    count: Any = fields.get("num_attention_heads")
    if checkpoint.has(norm):
        width = checkpoint.vector(norm)
    elif width is None and is_whole(count) and count >= 1:
        width = rows // count
    keys, _ = checkpoint.matrix(f"{first}self_attn.k_proj.weight")
    if (
        not is_whole(width)
        or width < 2
        or width % 2
        or rows % width
        or keys % width
        or (rows // width) % (keys // width)
    ):
        raise CheckpointError(
            f"{checkpoint.label}: {rows} query and {keys} key values cannot be cut into heads of {width}; "
            "head_dim or num_attention_heads in its config is missing or wrong"
        )
    return Heads(rows // width, keys // width, width)


def _states(
    checkpoint: Checkpoint, fields: Mapping[str, Any], target: Target, given: Overrides, fusion: str | None
) -> tuple[int, ...]:
    """The boundaries an EAGLE-3 head reads.

    Default ids and vLLM's explicit ones count the layers before a state. SpecForge's name the layer that gives it:
    they begin with 1, and the state is one boundary on. The speculators format always counts.
    """
    last, width = target.model.config.num_layers, target.model.config.hidden_size
    said = given.layer_ids or fields.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(said, list | tuple | None):
        raise CheckpointError(
            f"{checkpoint.label} gives eagle_aux_hidden_state_layer_ids={said!r:.60}; allowed: a list of numbers"
        )
    if fields.get("use_aux_hidden_state") is False or (fusion is None and len(said or ()) < 2):
        return (FINAL,)
    _, columns = checkpoint.matrix(f"{fusion or FUSIONS[0]}weight")
    if columns % width:
        raise CheckpointError(
            f"{checkpoint.label} was made for another target: it reads {columns} values of a token's states, which is "
            f"no multiple of this target's hidden size {width}"
        )
    ids = [2, last // 2, last - 3] if said is None else list(said)
    counted = given.layer_ids is not None or said is None or speculators.is_ours(checkpoint.config)
    if not counted and ids and ids[0] == 1 and last not in ids:
        ids = [number + 1 for number in ids]
    if any(not is_whole(number) or not 0 <= number <= last for number in ids):
        raise CheckpointError(
            f"{checkpoint.label} reads states after {ids} layers, but this target has {last}; it was made "
            "for another target, or layer_ids=(…) names others"
        )
    if len(ids) * width != columns:
        raise CheckpointError(
            f"{checkpoint.label} reads {columns // width} states of this target's hidden size {width}, but is given "
            f"{len(ids)}: after {ids} layers; it was made for another target, or layer_ids=(…) names others"
        )
    return tuple(ids)


def _last_norm(checkpoint: Checkpoint, fields: Mapping[str, Any], third: bool) -> str | None:
    """EAGLE-3 norms before its head; EAGLE-1 does not, unless its file says so."""
    found = _there(checkpoint, LAST_NORMS)
    if third:
        return found or LAST_NORMS[0]
    return found if fields.get("layernorms") or fields.get("skip_output_norm") is False else None


def _state_norms(checkpoint: Checkpoint, fields: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """One for each state, where the config or a tensor says so."""
    if checkpoint.has(OLD_STATE_NORMS[0]):
        return OLD_STATE_NORMS
    says = fields.get("fc_norm") or fields.get("use_aux_norm") or checkpoint.has("fc_norm.0.weight")
    return tuple(f"fc_norm.{number}.weight" for number in range(count)) if says else ()


def _mask(checkpoint: Checkpoint, fields: Mapping[str, Any], target: Target) -> int | None:
    """The token that stands where none is known yet, of a head that drafts in parallel."""
    names = ("mask_token_id", "pard_token", "ptd_token_id")
    found: Any = next((fields[name] for name in names if fields.get(name) is not None), None)
    if found is None and not checkpoint.has("mask_hidden"):
        return None
    checkpoint.tensor("mask_hidden")  # it has to be there
    size = target.model.config.vocab_size
    if not is_whole(found) or not 0 <= found < size:
        raise CheckpointError(
            f"{checkpoint.label} drafts in parallel but gives mask_token_id={found!r}; allowed: a token id below {size}"
        )
    return int(found)


def read_vocabulary(checkpoint: Checkpoint, size: int, targets: int) -> Tensor | None:
    """The target's id of each of a head's `size` rows; None: they are the target's own rows."""
    name = next((name for name in ("d2t", "token_map") if checkpoint.has(name)), None)
    if name is None:
        checkpoint.check("a vocabulary of", size, targets)
        return None
    return checkpoint.token_ids(name, size, targets)


def read_ids(value: Any) -> tuple[int, ...] | None:
    """Of the option layer_ids: numbers, or the same in a text."""
    if value is None:
        return None
    parts = value.split("/") if isinstance(value, str) else value
    try:
        if not parts or any(isinstance(part, bool | float) for part in parts):
            raise ValueError
        return tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        raise OptionError(
            f"layer_ids={value!r} is not allowed; allowed: numbers, as (2, 15, 27) or '2/15/27'"
        ) from None


def _says(checkpoint: Checkpoint, fields: Mapping[str, Any], flag: str, tensor: str) -> bool:
    return bool(fields.get(flag)) or checkpoint.has(f"{tensor}.weight")


def _there(checkpoint: Checkpoint, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if checkpoint.has(name)), None)


def _find(checkpoint: Checkpoint, prefixes: tuple[str, ...], name: str) -> str:
    found = next((prefix for prefix in prefixes if checkpoint.has(prefix + name)), None)
    if found is None:
        raise CheckpointError(f"{checkpoint.label} lacks the tensor {prefixes[1]}{name}, which this drafter needs")
    return found
