"""OPT: learned positions that start at 2; in the 350m size a narrower embedding and norms after the blocks."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import Forward, Heads
from paceline.models.base import Model
from paceline.models.config import ModelConfig, read_activation
from paceline.models.layers.linear import Linear
from paceline.models.weights import Weights

POSITION_OFFSET = 2


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.eps, self.first = config.norm_eps, config.norm_first
        hidden, wide = config.hidden_size, config.intermediate_size
        attention = weights.under("self_attn.")
        names = ["q_proj", "k_proj", "v_proj"]
        matrix = attention.matrix([f"{name}.weight" for name in names], [(hidden, hidden)] * 3)
        self.qkv = Linear(matrix, attention.vectors([f"{name}.bias" for name in names], [(hidden,)] * 3))
        out = attention.matrix(["out_proj.weight"], [(hidden, hidden)])
        self.out = Linear(out, attention.whole("out_proj.bias", (hidden,)))
        self.up = Linear(weights.matrix(["fc1.weight"], [(wide, hidden)]), weights.whole("fc1.bias", (wide,)))
        self.down = Linear(weights.matrix(["fc2.weight"], [(hidden, wide)]), weights.whole("fc2.bias", (hidden,)))
        self.norms = [
            (weights.whole(f"{name}.weight", (hidden,)), weights.whole(f"{name}.bias", (hidden,)))
            for name in ("self_attn_layer_norm", "final_layer_norm")
        ]

    def before(self, f: Forward, x: Any, which: int) -> Any:
        return f.layer_norm(x, *self.norms[which], self.eps) if self.first else x

    def after(self, f: Forward, x: Any, which: int) -> Any:
        return x if self.first else f.layer_norm(x, *self.norms[which], self.eps)


class OPT(Model):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        body = weights.under("model.decoder." if weights.has("model.decoder.embed_positions.weight") else "decoder.")
        hidden, narrow = config.hidden_size, config.embed_size or config.hidden_size
        names = (body.prefix + "embed_tokens.weight", "lm_head.weight")
        self.embedding, self.head = weights.vocabulary(*names, (config.vocab_size, narrow), config.tie_embeddings)
        self.positions = body.whole("embed_positions.weight", (config.max_position + POSITION_OFFSET, hidden))
        self.layers = [Layer(config, body.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.norm = None
        if config.norm_first:
            self.norm = (
                body.whole("final_layer_norm.weight", (hidden,)),
                body.whole("final_layer_norm.bias", (hidden,)),
            )
        self.project_in = self.project_out = None
        if narrow != hidden:
            self.project_in = Linear(body.matrix(["project_in.weight"], [(hidden, narrow)]))
            self.project_out = Linear(body.matrix(["project_out.weight"], [(narrow, hidden)]))

    def describe(self, f: Forward) -> Any:
        x = f.embed(self.embedding)
        if self.project_in is not None:
            x = self.project_in(f, x)
        x = f.add_positions(x, self.positions, POSITION_OFFSET)
        f.tap(0, x)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(f, layer.before(f, x, 0))
            x = f.add(x, layer.out(f, f.attention(qkv, self.heads, number, None)))
            x = layer.after(f, x, 0)
            wide = f.activation(layer.up(f, layer.before(f, x, 1)), self.config.activation)
            x = layer.after(f, f.add(x, layer.down(f, wide)), 1)
            f.tap(number + 1, x)
        if self.norm is not None:
            x = f.layer_norm(x, *self.norm, self.config.norm_eps)
        return x if self.project_out is None else self.project_out(f, x)


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
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
        "intermediate_size": config.ffn_dim,
        "max_position": config.max_position_embeddings,
        "norm_eps": 1e-5,
        "activation": read_activation(config.activation_function),
        "tie_embeddings": bool(config.tie_word_embeddings),
        "embed_size": config.word_embed_proj_dim,
        "norm_first": bool(config.do_layer_norm_before),
    }
