"""GPT-2: learned positions, one fused attention matrix, weights stored input-first."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import Forward, Heads
from paceline.models.base import Model
from paceline.models.config import ModelConfig, read_activation
from paceline.models.layers.linear import Linear
from paceline.models.weights import Weights


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hidden, wide = config.hidden_size, config.intermediate_size

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear(weights.transposed(f"{name}.weight", (out, width)), weights.whole(f"{name}.bias", (out,)))

        self.qkv = linear("attn.c_attn", 3 * hidden, hidden)
        self.out = linear("attn.c_proj", hidden, hidden)
        self.up = linear("mlp.c_fc", wide, hidden)
        self.down = linear("mlp.c_proj", hidden, wide)
        self.attention_norm = (weights.whole("ln_1.weight", (hidden,)), weights.whole("ln_1.bias", (hidden,)))
        self.feed_forward_norm = (weights.whole("ln_2.weight", (hidden,)), weights.whole("ln_2.bias", (hidden,)))


class GPT2(Model):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        hidden = config.hidden_size
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        body = weights.under("transformer." if weights.has("transformer.wpe.weight") else "")
        names = (body.prefix + "wte.weight", "lm_head.weight")
        self.embedding, self.head = weights.vocabulary(*names, (config.vocab_size, hidden), config.tie_embeddings)
        self.positions = body.whole("wpe.weight", (config.max_position, hidden))
        self.layers = [Layer(config, body.under(f"h.{i}.")) for i in range(config.num_layers)]
        self.norm = (body.whole("ln_f.weight", (hidden,)), body.whole("ln_f.bias", (hidden,)))

    def describe(self, f: Forward) -> Any:
        eps = self.config.norm_eps
        x = f.add_positions(f.embed(self.embedding), self.positions, 0)
        f.tap(0, x)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(f, f.layer_norm(x, *layer.attention_norm, eps))
            x = f.add(x, layer.out(f, f.attention(qkv, self.heads, number, None)))
            wide = layer.up(f, f.layer_norm(x, *layer.feed_forward_norm, eps))
            x = f.add(x, layer.down(f, f.activation(wide, self.config.activation)))
            f.tap(number + 1, x)
        return f.layer_norm(x, *self.norm, eps)


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    if getattr(config, "scale_attn_by_inverse_layer_idx", False) or not getattr(config, "scale_attn_weights", True):
        raise CheckpointError("this gpt2 variant scales attention by layer, which is not supported")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "num_kv_heads": config.n_head,
        "head_dim": None,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "max_position": config.n_positions,
        "norm_eps": config.layer_norm_epsilon,
        "activation": read_activation(config.activation_function),
        "tie_embeddings": bool(config.tie_word_embeddings),
    }
