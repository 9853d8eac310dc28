"""Qwen3-Next's layers that see everything: gated attention whose heads turn in part, experts and a gated shared one.

Its MTP modules are made of them. The model itself has layers of linear attention between them, whose state cannot be
taken back by a length: it is no family yet, and its modules are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.kernels import Ops
from paceline.kernels.ops import Forward, Routing, Weight
from paceline.models import llama
from paceline.models.config import MixtureConfig, ModelConfig
from paceline.models.layers.experts import load_mixture
from paceline.models.layers.linear import Linear
from paceline.models.weights import Weights


class Layer(llama.Layer):
    """A head's rows of q_proj are its query and its gate, which what it saw is multiplied with."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        assert self.q_norm is not None and self.k_norm is not None
        own = (self.attention_norm, self.feed_forward_norm, self.q_norm, self.k_norm)
        self.attention_norm, self.feed_forward_norm, self.q_norm, self.k_norm = (
            norm + config.norm_offset for norm in own
        )

    def _load_attention(self, config: ModelConfig, weights: Weights) -> None:
        hidden, head, heads = config.hidden_size, config.head_dim, config.num_heads
        size, shared = heads * head, config.num_kv_heads * head

        def part(use: str, number: int) -> Weight:
            def rows(matrix: Tensor) -> list[Tensor]:
                return [matrix.view(heads, 2, head, hidden)[:, number].reshape(size, hidden)]

            return weights.derived("q_proj.weight", (2 * size, hidden), (size, hidden), use, rows)

        self.query, self.gate = part("query", 0), part("gate", 1)
        self.keys_values = weights.matrix(["k_proj.weight", "v_proj.weight"], [(shared, hidden)] * 2)
        self.out = Linear(weights.matrix(["o_proj.weight"], [(hidden, size)]))
        self.q_norm = weights.whole("q_norm.weight", (head,))
        self.k_norm = weights.whole("k_norm.weight", (head,))

    def _load_feed_forward(self, config: ModelConfig, weights: Weights) -> None:
        assert config.mixture is not None
        hidden, self.activation = config.hidden_size, config.activation
        self.mixture, shared = load_mixture(config, weights), weights.under("shared_expert.")
        wide = config.intermediate_size
        self.gate_up = Linear(shared.matrix(["gate_proj.weight", "up_proj.weight"], [(wide, hidden)] * 2))
        self.down = Linear(shared.matrix(["down_proj.weight"], [(hidden, wide)]))
        # One number a row, as often as a row is wide, since values are multiplied one by one.
        self.share = weights.derived(
            "shared_expert_gate.weight", (1, hidden), (hidden, hidden), "each", lambda one: [one.expand(hidden, -1)]
        )

    def feed_forward(self, f: Forward, x: Any) -> Any:
        share = f.activation(f.linear(x, self.share, None), "sigmoid")
        return f.add(self.mixture(f, x), f.multiply(share, super().feed_forward(f, x)))


class Qwen3Next(llama.Llama):
    """Of such layers alone."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        super().__init__(config, ops, weights, max_position)
        self.norm = self.norm + config.norm_offset

    @staticmethod
    def load_layer(number: int, config: ModelConfig, weights: Weights) -> Layer:
        return Layer(config, weights)

    def run_layer(self, f: Forward, layer: Any, x: Any, number: int, window: int | None = None) -> Any:
        eps = self.config.norm_eps
        normed = f.rms_norm(x, layer.attention_norm, eps)
        qkv = f.concat(f.linear(normed, layer.query, None), f.linear(normed, layer.keys_values, None))
        qkv = f.head_norm(qkv, self.heads, layer.q_norm, layer.k_norm, eps)
        seen = f.attention(f.rope(qkv, self.heads, self.cos, self.sin), self.heads, number, window)
        gate = f.activation(f.linear(normed, layer.gate, None), "sigmoid")
        x = f.add(x, layer.out(f, f.multiply(seen, gate)))
        return f.add(x, layer.feed_forward(f, f.rms_norm(x, layer.feed_forward_norm, eps)))


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config; a feed-forward is as wide as the shared expert."""
    routing = Routing(config.num_experts_per_tok, "softmax", bool(config.norm_topk_prob))
    mixture = MixtureConfig(config.num_experts, config.moe_intermediate_size, routing)
    turning = llama.read_rotary(config, config.head_dim, 0.25)
    own = {"rotary_dim": turning, "qk_norm": True, "norm_offset": 1.0, "mixture": mixture}
    return {**llama.read(config), **own, "intermediate_size": config.shared_expert_intermediate_size}
