"""What a model is made of, in one spelling; checks and translations that families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import CheckpointError
from paceline.kernels.ops import Routing


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base and how it was stretched."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0  # yarn: waves with more turns are kept
    beta_slow: float = 1.0  # those with fewer are stretched by the factor
    truncate: bool = True  # the range between them is widened to whole numbers
    amplitude: float = 1.0  # of cosines and sines


@dataclass(frozen=True)
class Latent:
    """Attention through a narrow row that all heads share (DeepSeek's MLA): widths of its parts."""

    rank: int  # of the row that keys and values are made of
    query_rank: int | None  # None: queries are made of the hidden state itself
    plain_dim: int  # of a key's part that is made of that row
    rope_dim: int  # of its part that turns, which stands in the row as it is, once for all heads
    value_dim: int
    interleaved: bool  # in files, the values that turn stand pair by pair
    absorbed: bool = True  # the matrices that make keys and values belong to queries and results; the row is cached


@dataclass(frozen=True)
class MixtureConfig:
    """Experts in place of a feed-forward."""

    num_experts: int
    width: int  # of each, as intermediate_size is of a feed-forward
    routing: Routing
    dense_layers: tuple[int, ...] = ()  # layers that have a feed-forward all the same
    shared_width: int = 0  # of an expert that every row goes through besides; 0: there is none


@dataclass(frozen=True)
class ModelConfig:
    """The target or a draft model, whatever its family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    activation: str
    tie_embeddings: bool
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None  # of layers with a window, where it is another
    rotary_dim: int | None = None  # of each head so many values turn; None: all
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    latent: Latent | None = None
    norm_offset: float = 0.0  # what a file's norms are to be added to
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # one per layer; empty: no layer has one
    mixture: MixtureConfig | None = None
    embed_size: int | None = None  # OPT-350m projects from a smaller embedding
    norm_first: bool = True  # OPT-350m norms after each block
    learned_positions: bool = False  # a table of them, so that nothing is known beyond max_position
    eos_ids: tuple[int, ...] = ()
    torch_dtype: str | None = None

    def naive(self) -> ModelConfig:
        """The same, keys and values of every head being cached where a row for all heads might be."""
        return self if self.latent is None else replace(self, latent=replace(self.latent, absorbed=False))

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position",
)
MOST = 2**31 - 1


def make_config(fields: dict[str, Any], label: str) -> ModelConfig:
    """A config of what a file says, once its counts are known to make a model.

    A head that no width is given for (None) is hidden_size / num_heads wide.
    """
    heads, hidden = fields["num_heads"], fields["hidden_size"]
    for name in COUNTS:
        if name == "head_dim" and fields[name] is None:
            if hidden % heads:
                raise CheckpointError(f"{label} gives num_heads={heads}; allowed: a divisor of hidden_size={hidden}")
            fields = {**fields, name: hidden // heads}
        if not is_whole(fields[name]) or not 1 <= fields[name] <= MOST:
            raise CheckpointError(f"{label} gives {name}={fields[name]!r}; allowed: a whole number from 1 to {MOST}")
    config = ModelConfig(**fields)
    if heads % config.num_kv_heads:
        raise CheckpointError(f"{label} gives num_kv_heads={config.num_kv_heads}; allowed: a divisor of {heads} heads")
    if not is_finite(config.norm_eps) or config.norm_eps < 0:
        raise CheckpointError(f"{label} gives norm_eps={config.norm_eps!r}; allowed: a number from 0 on")
    _check_positions(config, label)
    if config.mixture is not None:
        _check_mixture(config.mixture, label)
    return config


def _check_positions(config: ModelConfig, label: str) -> None:
    """Halves of what turns can rotate, and windows show something. A latent says for itself what turns."""
    head, turning = config.head_dim, config.rotary_dim
    if not config.learned_positions and config.latent is None and head % 2:
        raise CheckpointError(f"{label} gives head_dim={head}; allowed: an even number, since halves rotate")
    if turning is not None and not 1 <= turning <= head:
        raise CheckpointError(f"{label} lets {turning} values of a head turn; allowed: from 1 to {head}")
    for width in config.windows:
        if width is not None and (not is_whole(width) or width < 1):
            raise CheckpointError(f"{label} gives sliding_window={width!r}; allowed: a whole number from 1 on")


def _check_mixture(mixture: MixtureConfig, label: str) -> None:
    """So many can be chosen of what there is."""
    count, how = mixture.num_experts, mixture.routing
    bounds = {"num_experts": (count, MOST), "expert width": (mixture.width, MOST)}
    bounds |= {"num_groups": (how.num_groups, count), "kept_groups": (how.kept_groups, how.num_groups)}
    for name, (value, most) in bounds.items():
        if not is_whole(value) or not 1 <= value <= most:
            raise CheckpointError(f"{label} gives {name}={value!r}; allowed: a whole number from 1 to {most}")
    if count % how.num_groups:
        raise CheckpointError(f"{label} gives num_groups={how.num_groups}; allowed: a divisor of {count} experts")
    most = count // how.num_groups * how.kept_groups
    if not is_whole(how.num_chosen) or not 1 <= how.num_chosen <= most:
        raise CheckpointError(
            f"{label} chooses {how.num_chosen!r} experts for a token; allowed: a whole number from 1 to {most}"
        )
    if not is_finite(how.factor):
        raise CheckpointError(f"{label} multiplies what experts say by {how.factor!r}; allowed: a finite number")


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def end_ids(value: Any, label: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for one in ids:
        if not is_whole(one):
            raise CheckpointError(f"{label}: eos_token_id={value!r} is not allowed; allowed: token ids")
    return tuple(ids)


def read_rope(config: Any) -> RopeConfig:
    """Of a transformers config: version 5 keeps theta and scaling in rope_parameters; older configs apart."""
    values = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"a config gives {values!r} as its rope scaling; allowed: names with their values")
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str) or kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    positions, longest = "original_max_position_embeddings", getattr(config, "max_position_embeddings", None)
    outside = {name: getattr(config, name, None) for name in ("rope_theta", positions)}
    said = outside | {name: value for name, value in values.items() if value}
    if not said[positions]:
        positions, said["max_position_embeddings"] = "max_position_embeddings", longest
    fields: dict[str, Any] = {
        "theta": read_number(said, "rope_theta", 10000.0),
        "kind": kind,
        "factor": read_number(said, "factor", 1.0),
        "low_freq_factor": read_number(said, "low_freq_factor", 1.0),
        "high_freq_factor": read_number(said, "high_freq_factor", 4.0),
        "original_max_position": int(read_number(said, positions, 2048)),
    }
    return RopeConfig(**fields | (_read_yarn(said, values, longest) if kind == "yarn" else {}))


def _read_yarn(said: Mapping[str, Any], values: Mapping[str, Any], longest: Any) -> dict[str, Any]:
    """What yarn says besides; as in transformers a factor that is missing is the ratio of the lengths."""
    original = read_number(said, "original_max_position_embeddings", longest or 2048)
    factor = read_number(said, "factor", (longest or original) / original)
    if said.get("attention_factor"):
        amplitude = read_number(said, "attention_factor", 1.0)
    elif said.get("mscale") and said.get("mscale_all_dim"):
        scales = [read_number(said, name, 1.0) for name in ("mscale", "mscale_all_dim")]
        amplitude = yarn_growth(factor, scales[0]) / yarn_growth(factor, scales[1])
    else:
        amplitude = yarn_growth(factor)
    return {
        "factor": factor,
        "beta_fast": read_number(said, "beta_fast", 32.0),
        "beta_slow": read_number(said, "beta_slow", 1.0),
        "truncate": bool(values.get("truncate", True)),
        "amplitude": amplitude,
    }


def yarn_growth(factor: float, scale: float = 1.0) -> float:
    """By how much scores grow with a context that is stretched by a factor."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_number(said: Mapping[str, Any], name: str, default: float) -> float:
    """A number of a config, above 0; the default where it is not said, or empty."""
    value = said.get(name) or default
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = 0.0
    if not 0 < found < float("inf"):
        raise CheckpointError(f"a config gives {name}={value!r:.60}; allowed: a number above 0")
    return found


def read_activation(name: Any) -> str:
    """Ours for a name of transformers."""
    known = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_new"}
    known["gelu_pytorch_tanh"] = "gelu_new"
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(f"activation {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]
