"""What a model is made of, in one spelling. Every Hugging Face and GGUF name for it is translated here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, first_line
from paceline.models.json_file import read_object
from paceline.models.quantised import refuse_config

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = (*LLAMA_LIKE, "gpt2", "opt")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base and how it was stretched."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # one per layer; empty: no layer has one
    embed_size: int | None = None  # OPT-350m projects from a smaller embedding
    norm_first: bool = True  # OPT-350m norms after each block
    learned_positions: bool = False  # a table of them, so that nothing is known beyond max_position
    eos_ids: tuple[int, ...] = ()
    torch_dtype: str | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


def read_config(folder: Path) -> ModelConfig:
    """From a Hugging Face folder's config.json (and generation_config.json, for the end tokens)."""
    path = folder / "config.json"
    try:
        raw = read_object(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face model folder") from None
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"{path} says model_type {kind!r}; supported: {', '.join(ARCHITECTURES)}")
    refuse_config(raw.get("quantization_config"), str(folder))
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ZeroDivisionError:
        raise CheckpointError(f"{path} gives 0 where a count of at least 1 is needed") from None
    except Exception as error:
        raise CheckpointError(f"{path} is not a usable {kind} config: {first_line(error)}") from None
    return from_transformers(config, _generation_eos(folder), str(path))


def _generation_eos(folder: Path) -> Any:
    try:
        return read_object(folder / "generation_config.json").get("eos_token_id")
    except FileNotFoundError:
        return None


def from_transformers(config: Any, eos: Any = None, label: str = "the config") -> ModelConfig:
    """From a loaded transformers config object."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"model type {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    refuse_config(getattr(config, "quantization_config", None), f"the {kind} model")
    try:
        build = {"gpt2": _gpt2, "opt": _opt}.get(kind, _llama)
        fields = build(config)
    except AttributeError as error:
        raise CheckpointError(f"the {kind} config lacks a value: {error}") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the {kind} config has a value that cannot be used: {error}") from None
    dtype = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)
    common = {
        "architecture": kind,
        "eos_ids": end_ids(eos, label) or end_ids(getattr(config, "eos_token_id", None), label),
        "torch_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    return make_config({**common, **fields}, label)


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
    if not config.learned_positions and config.head_dim % 2:
        raise CheckpointError(f"{label} gives head_dim={config.head_dim}; allowed: an even number, since halves rotate")
    return config


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def end_ids(value: Any, label: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for one in ids:
        if not is_whole(one):
            raise CheckpointError(f"{label}: eos_token_id={value!r} is not allowed; allowed: token ids")
    return tuple(ids)


def _llama(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    kind = config.model_type
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None),
        "intermediate_size": config.intermediate_size,
        "max_position": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": _activation(config.hidden_act),
        "tie_embeddings": bool(config.tie_word_embeddings),
        "rope": _rope(config),
        "qkv_bias": kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
        "out_bias": kind in ("llama", "qwen3") and bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "qk_norm": kind == "qwen3",
        "windows": _windows(config),
    }


def _windows(config: Any) -> tuple[int | None, ...]:
    """Mistral gives every layer a window; Qwen only those above a line, and only when it says so."""
    width = getattr(config, "sliding_window", None)
    if not width or (config.model_type.startswith("qwen") and not getattr(config, "use_sliding_window", False)):
        return ()
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and config.model_type.startswith("qwen"):
        return tuple(width if kind == "sliding_attention" else None for kind in kinds)
    return (int(width),) * int(layers)


def _rope(config: Any) -> RopeConfig:
    """transformers 5 keeps theta and scaling in rope_parameters; older configs apart."""
    values = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    theta = values.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(values.get("factor") or 1.0),
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        original_max_position=int(
            values.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        ),
    )


def _gpt2(config: Any) -> dict[str, Any]:
    if getattr(config, "scale_attn_by_inverse_layer_idx", False) or not getattr(config, "scale_attn_weights", True):
        raise CheckpointError("this gpt2 variant scales attention by layer, which is not supported")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "num_kv_heads": config.n_head,
        "head_dim": None,
        "learned_positions": True,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "max_position": config.n_positions,
        "norm_eps": config.layer_norm_epsilon,
        "activation": _activation(config.activation_function),
        "tie_embeddings": bool(config.tie_word_embeddings),
    }


def _opt(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    if not config.enable_bias or not config.layer_norm_elementwise_affine:
        raise CheckpointError("this opt variant has no biases or no norm weights, which is not supported")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": None,
        "learned_positions": True,
        "intermediate_size": config.ffn_dim,
        "max_position": config.max_position_embeddings,
        "norm_eps": 1e-5,
        "activation": _activation(config.activation_function),
        "tie_embeddings": bool(config.tie_word_embeddings),
        "embed_size": config.word_embed_proj_dim,
        "norm_first": bool(config.do_layer_norm_before),
    }


def _activation(name: str) -> str:
    known = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_new"}
    known["gelu_pytorch_tanh"] = "gelu_new"
    if name not in known:
        raise CheckpointError(f"activation {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]
