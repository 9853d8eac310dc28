"""Gemma 3, text: norms on both sides of attention and feed-forward, windows with a rotation of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import Forward, Heads
from paceline.models import llama
from paceline.models.base import Model
from paceline.models.config import ModelConfig, RopeConfig, is_finite, read_rope
from paceline.models.layers.rope import tables
from paceline.models.weights import Weights

PERIOD = 6  # one layer in so many sees everything; GGUF files do not say
LOCAL_THETA = 10000.0  # of windowed layers; the same


class Layer(llama.Layer):
    """Attention and a gated feed-forward, each between two norms."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self.norms = [norm_weight(config, weights, f"{name}_layernorm.weight", config.hidden_size) for name in norms]
        self._load_attention(config, weights.under("self_attn."))
        assert self.q_norm is not None and self.k_norm is not None
        self.q_norm, self.k_norm = self.q_norm + config.norm_offset, self.k_norm + config.norm_offset
        self._load_feed_forward(config, weights.under("mlp."))


def norm_weight(config: ModelConfig, weights: Weights, name: str, width: int) -> Tensor:
    """Its files hold what is added to 1, GGUF files the sum."""
    return weights.whole(name, (width,)) + config.norm_offset


class Gemma3(Model):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        body, shape = weights.under("model."), (config.vocab_size, config.hidden_size)
        names = (body.prefix + "embed_tokens.weight", "lm_head.weight")
        self.embedding, self.head = weights.vocabulary(*names, shape, config.tie_embeddings)
        self.layers = [Layer(config, body.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.norm = norm_weight(config, body, "norm.weight", config.hidden_size)
        length = max_position or config.max_position
        ropes = {False: config.rope, True: config.local_rope or config.rope}  # by whether a layer has a window
        self.turns = {
            windowed: [table.to(weights.device) for table in tables(rope, config.head_dim, length)]
            for windowed, rope in ropes.items()
        }

    def describe(self, f: Forward) -> Any:
        config, eps = self.config, self.config.norm_eps
        x = f.scale(f.embed(self.embedding), config.hidden_size**0.5)
        f.tap(0, x)
        for number, layer in enumerate(self.layers):
            before, after, before_wide, after_wide = layer.norms
            window = config.window(number)
            assert layer.q_norm is not None and layer.k_norm is not None
            qkv = f.head_norm(layer.qkv(f, f.rms_norm(x, before, eps)), self.heads, layer.q_norm, layer.k_norm, eps)
            qkv = f.rope(qkv, self.heads, *self.turns[window is not None])
            seen = f.attention(qkv, self.heads, number, window, scale=config.attention_scale)
            x = f.add(x, f.rms_norm(layer.out(f, seen), after, eps))
            wide = layer.gate_up(f, f.rms_norm(x, before_wide, eps))
            x = f.add(x, f.rms_norm(layer.down(f, f.gated(wide, config.activation)), after_wide, eps))
            f.tap(number + 1, x)
        return f.rms_norm(x, self.norm, eps)


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            raise CheckpointError(f"the gemma3_text config says {name}={getattr(config, name)!r}; allowed: none")
    scalar = config.query_pre_attn_scalar
    if not is_finite(scalar) or scalar <= 0:
        raise CheckpointError(
            f"the gemma3_text config gives query_pre_attn_scalar={scalar!r}; allowed: a number above 0"
        )
    kinds, width, said = config.layer_types, config.sliding_window, vars(config)
    whole = {**said, "hidden_act": config.hidden_activation, **_rope(config, "full")}
    return {
        **llama.read(SimpleNamespace(**whole)),
        "local_rope": read_rope(SimpleNamespace(**{**said, **_rope(config, "sliding")})),
        "windows": tuple(width if kind == "sliding_attention" else None for kind in kinds),
        "attention_scale": scalar**-0.5,
        "norm_offset": 1.0,
    }


def _rope(config: Any, kind: str) -> dict[str, Any]:
    """One kind of layer's rotation: version 5 has both in rope_parameters, older configs have them apart."""
    both = getattr(config, "rope_parameters", None) or {}
    if f"{kind}_attention" in both:
        return {"rope_parameters": both[f"{kind}_attention"], "rope_scaling": None}
    if kind == "sliding":
        return {"rope_parameters": None, "rope_scaling": None, "rope_theta": config.rope_local_base_freq}
    return {}


def read_gguf(number_of: Callable[[str, float], float], num_layers: int) -> dict[str, Any]:
    """What GGUF files leave to the reader; number_of(key, default) is a number they do give."""
    width = int(number_of("attention.sliding_window", 512))
    return {
        "windows": tuple(None if (layer + 1) % PERIOD == 0 else width for layer in range(num_layers)),
        "local_rope": RopeConfig(theta=LOCAL_THETA),
    }


GGUF = (
    llama.GGUF[0],
    {
        **llama.GGUF[1],
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
