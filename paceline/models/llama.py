"""Llama and its kin: Llama 1/2/3, Vicuna, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.kernels import Ops
from paceline.kernels.ops import Forward, Heads
from paceline.models.base import Model
from paceline.models.config import ModelConfig, read_activation, read_rope
from paceline.models.layers.linear import Linear
from paceline.models.layers.rope import tables
from paceline.models.weights import Weights


class Layer:
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._load_norms(config, weights)
        self._load_attention(config, weights.under("self_attn."))
        self._load_feed_forward(config, weights.under("mlp."))

    def feed_forward(self, f: Forward, x: Any) -> Any:
        return self.down(f, f.gated(self.gate_up(f, x), self.activation))

    def _load_norms(self, config: ModelConfig, weights: Weights) -> None:
        self.attention_norm = weights.whole("input_layernorm.weight", (config.hidden_size,))
        self.feed_forward_norm = weights.whole("post_attention_layernorm.weight", (config.hidden_size,))

    def _load_attention(self, config: ModelConfig, weights: Weights) -> None:
        hidden, head = config.hidden_size, config.head_dim
        names = ["q_proj", "k_proj", "v_proj"]
        sizes = [config.num_heads * head, config.num_kv_heads * head, config.num_kv_heads * head]
        bias = weights.vectors([f"{name}.bias" for name in names], [(n,) for n in sizes]) if config.qkv_bias else None
        matrix = weights.matrix([f"{name}.weight" for name in names], [(n, hidden) for n in sizes])
        self.qkv = Linear(matrix, bias)
        out_bias = weights.whole("o_proj.bias", (hidden,)) if config.out_bias else None
        self.out = Linear(weights.matrix(["o_proj.weight"], [(hidden, sizes[0])]), out_bias)
        self.q_norm = weights.whole("q_norm.weight", (head,)) if config.qk_norm else None
        self.k_norm = weights.whole("k_norm.weight", (head,)) if config.qk_norm else None

    def _load_feed_forward(self, config: ModelConfig, weights: Weights) -> None:
        hidden, wide, self.activation = config.hidden_size, config.intermediate_size, config.activation
        names = ["gate_proj", "up_proj"]
        bias = weights.vectors([f"{name}.bias" for name in names], [(wide,)] * 2) if config.mlp_bias else None
        matrix = weights.matrix([f"{name}.weight" for name in names], [(wide, hidden)] * 2)
        self.gate_up = Linear(matrix, bias)
        down_bias = weights.whole("down_proj.bias", (hidden,)) if config.mlp_bias else None
        self.down = Linear(weights.matrix(["down_proj.weight"], [(hidden, wide)]), down_bias)


class Llama(Model):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        body = weights.under("model.")
        shape = (config.vocab_size, config.hidden_size)
        names = (body.prefix + "embed_tokens.weight", "lm_head.weight")
        self.embedding, self.head = weights.vocabulary(*names, shape, config.tie_embeddings)
        self.layers = [self.load_layer(i, config, body.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.norm = body.whole("norm.weight", (config.hidden_size,))
        frequencies = "rope_freqs.weight"  # only GGUF files carry it
        turning = config.rotary_dim or config.head_dim
        factors = weights.whole(frequencies, (turning // 2,)) if weights.has(frequencies) else None
        cos, sin = tables(config.rope, turning, max_position or config.max_position, factors)
        self.cos, self.sin = cos.to(weights.device), sin.to(weights.device)

    @staticmethod
    def load_layer(number: int, config: ModelConfig, weights: Weights) -> Layer:
        return Layer(config, weights)

    def describe(self, f: Forward) -> Any:
        x = f.embed(self.embedding)
        f.tap(0, x)
        for number, layer in enumerate(self.layers):
            x = self.run_layer(f, layer, x, number, self.config.window(number))
            f.tap(number + 1, x)
        return f.rms_norm(x, self.norm, self.config.norm_eps)

    def run_layer(self, f: Forward, layer: Layer, x: Any, number: int, window: int | None = None) -> Any:
        eps = self.config.norm_eps
        qkv = layer.qkv(f, f.rms_norm(x, layer.attention_norm, eps))
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv = f.head_norm(qkv, self.heads, layer.q_norm, layer.k_norm, eps)
        qkv = f.rope(qkv, self.heads, self.cos, self.sin)
        x = f.add(x, layer.out(f, f.attention(qkv, self.heads, number, window)))
        return f.add(x, layer.feed_forward(f, f.rms_norm(x, layer.feed_forward_norm, eps)))

    def extra_layer(self, weights: Weights) -> Layer:
        return self.load_layer(self.config.num_layers, self.config, weights)

    def key_turns(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    shared = getattr(config, "num_key_value_heads", None)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_attention_heads if shared is None else shared,
        "head_dim": getattr(config, "head_dim", None),
        "intermediate_size": config.intermediate_size,
        "max_position": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": read_activation(config.hidden_act),
        "tie_embeddings": bool(config.tie_word_embeddings),
        "rope": read_rope(config),
        "qkv_bias": bool(getattr(config, "attention_bias", False)),
        "out_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
    }


def read_rotary(config: Any, head: int, share: float) -> int:
    """How many values of a head turn, where only a part of it does; `share`: the family's own, unless said."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(head * rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", share)))


def read_mistral(config: Any) -> dict[str, Any]:
    """Every layer has the window, if there is one."""
    width = getattr(config, "sliding_window", None)
    return {**read(config), "windows": (int(width),) * config.num_hidden_layers if width else ()}


def read_qwen(config: Any) -> dict[str, Any]:
    """Some layers have the window, and only where the config says that it is used."""
    width = config.sliding_window if config.use_sliding_window else None
    kinds = config.layer_types if width else ()
    return {**read(config), "windows": tuple(width if kind == "sliding_attention" else None for kind in kinds)}


# How GGUF files name the tensors of the whole model, and those of a layer.
GGUF = (
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
