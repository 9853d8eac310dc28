"""The speculators format (vllm-project): a config around a small transformer's own, and one file of tensors.

Read here is what all its algorithms share; what is written is read back as the same drafter, by us and by vLLM. Layer
ids are boundaries: they count the layers before a state. Knows the format; must not know how a drafter drafts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.base import FINAL
from paceline.errors import OptionError
from paceline.models.config import ModelConfig, RopeConfig, is_whole

if TYPE_CHECKING:
    from paceline.drafters.dflash import Shape
    from paceline.drafters.eagle_form import Form

log = logging.getLogger("paceline")

# What a layer's config leaves out has its class's default; without a class it is Qwen3's.
CLASSES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32, "rms_norm_eps": 1e-6},
    "qwen3": {"num_attention_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6},
}
CHAINS, TREES = ("greedy", "sampling"), ("dynamic_tree",)  # proposal methods with a count of tokens
STRICT = {"verifier_accept_k": 1, "accept_tolerance": 0.0, "accept_lenience": 1.0}  # what is no loss
STATE_NORM = "fc_norm.{}.weight"


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a config is in this format."""
    return "speculators_model_type" in config


def layer_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' own config with its class's defaults; empty where there is none."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return {}
    return {**CLASSES.get(str(layer.get("model_type", "qwen3")), CLASSES["llama"]), **layer}


def draft_length(config: Mapping[str, Any], kinds: Collection[str], label: str) -> int | None:
    """How many tokens its proposal method drafts, where that is of one of these kinds; None where it does not say.

    The first method counts, as vLLM has it. One that accepts what the target would not say is not followed in that.
    """
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict):
        return None
    loose = {name: first[name] for name, strict in STRICT.items() if first.get(name, strict) not in (strict, None)}
    if loose:
        told = ", ".join(f"{name}={value}" for name, value in loose.items())
        log.warning("%s asks for %s, which would change the text; it is left out", label, told)
    count: Any = first.get("speculative_tokens")
    return int(count) if first.get("proposal_type") in kinds and is_whole(count) and count >= 1 else None


@dataclass(frozen=True)
class MadeFor:
    """The target a drafter was made for: where it is found, its architecture, its sizes; and how long drafts are."""

    vocab_size: int
    hidden_size: int
    num_draft_tokens: int
    name: str | None = None
    architecture: str | None = None


def save_eagle(folder: Path, form: Form, tensors: Mapping[str, Tensor], made_for: MadeFor) -> None:
    """Write an EAGLE-3 or P-EAGLE head; its tensors are named as the form has it."""
    if not form.third:
        raise OptionError("an EAGLE-1 head cannot be written: the speculators format has dropped it; allowed: EAGLE-3")
    if form.fusion is None or FINAL in form.states:
        raise OptionError("a head that reads the target's last state alone has no place in the speculators format")
    parallel = form.mask is not None
    config = {
        **_begun("peagle" if parallel else "eagle3", "PEagle" if parallel else "Eagle3", made_for),
        "transformer_layer_config": {
            **_layer_config(tensors, form.rope),
            "hidden_size": form.hidden,
            "intermediate_size": form.wide,
            "num_hidden_layers": form.num_layers,
            "num_attention_heads": form.heads.num_heads,
            "num_key_value_heads": form.heads.num_kv_heads,
            "head_dim": form.heads.head_dim,
            "rms_norm_eps": form.eps,
            "hidden_act": form.activation,
            "vocab_size": made_for.vocab_size,
        },
        "draft_vocab_size": _head_rows(tensors, made_for),
        "target_hidden_size": None if made_for.hidden_size == form.hidden else made_for.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(form.states),
        "norm_before_residual": form.norm_before_residual,
        "norm_before_fc": form.joint_norm is not None,
        "fc_norm": bool(form.state_norms),
        "norm_output": form.norm_output,
        **({"mask_token_id": form.mask} if parallel else {}),
    }
    norms = {name: STATE_NORM.format(number) for number, name in enumerate(form.state_norms)}
    fronts = {form.first: "layers.0.", form.fusion: "fc."}
    named = {}
    for name, tensor in tensors.items():
        front = next((front for front in fronts if name.startswith(front)), "")
        named[norms.get(name) or fronts.get(front, "") + name.removeprefix(front)] = tensor
    _write(folder, config, named)


def save_dflash(
    folder: Path, shape: Shape, layers: ModelConfig, tensors: Mapping[str, Tensor], made_for: MadeFor
) -> None:
    """Write a DFlash drafter; its tensors have their published names."""
    if shape.causal:
        raise OptionError(
            "a causal DFlash drafter has no place in the speculators format; allowed: one whose rows see all"
        )
    config = {
        **_begun("dflash", "DFlash", made_for),
        "transformer_layer_config": {
            **_layer_config(tensors, layers.rope),
            "hidden_size": layers.hidden_size,
            "intermediate_size": layers.intermediate_size,
            "num_hidden_layers": layers.num_layers,
            "num_attention_heads": layers.num_heads,
            "num_key_value_heads": layers.num_kv_heads,
            "head_dim": layers.head_dim,
            "rms_norm_eps": layers.norm_eps,
            "hidden_act": layers.activation,
            "vocab_size": made_for.vocab_size,
        },
        "draft_vocab_size": _head_rows(tensors, made_for),
        "target_hidden_size": None if made_for.hidden_size == layers.hidden_size else made_for.hidden_size,
        "aux_hidden_state_layer_ids": list(shape.taps),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask,
        "sample_from_anchor": shape.anchor,
        "sliding_window_non_causal": False,
    }
    _write(folder, config, tensors)


def _begun(algorithm: str, name: str, made_for: MadeFor) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": made_for.num_draft_tokens}
    target = {"name_or_path": made_for.name, "architectures": [made_for.architecture] if made_for.architecture else []}
    return {
        "architectures": [f"{name}Speculator"],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": target,
        },
    }


def _layer_config(tensors: Mapping[str, Tensor], rope: RopeConfig) -> dict[str, Any]:
    """What tensors show of the layers' class, and its rotary positions."""
    scaling = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    return {
        "model_type": "qwen3" if any(name.endswith("q_norm.weight") for name in tensors) else "llama",
        "attention_bias": any(name.endswith("q_proj.bias") for name in tensors),
        "mlp_bias": any(name.endswith("up_proj.bias") for name in tensors),
        "max_position_embeddings": int(rope.original_max_position * rope.factor),
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "tie_word_embeddings": False,
    }


def _head_rows(tensors: Mapping[str, Tensor], made_for: MadeFor) -> int:
    head = tensors.get("lm_head.weight")
    return made_for.vocab_size if head is None else head.shape[0]


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
