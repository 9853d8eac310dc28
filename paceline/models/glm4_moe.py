"""GLM-4.5: a Llama whose heads turn in part, with experts behind its first layers, one of which every row passes."""

from __future__ import annotations

from typing import Any

from paceline.kernels import Ops
from paceline.models import llama
from paceline.models.config import ModelConfig
from paceline.models.layers.experts import check_biases
from paceline.models.mixture import MixtureLlama, read_grouped
from paceline.models.weights import Weights


class GLM4MoE(MixtureLlama):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        super().__init__(config, ops, weights, max_position)
        check_biases(self.layers, weights.under("model.layers."))
        weights.under("model.").leave_out_modules(config.num_layers)


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    fields, mixture = llama.read(config), read_grouped(config)
    head = fields["head_dim"] or config.hidden_size // config.num_attention_heads
    own = {"head_dim": head, "rotary_dim": llama.read_rotary(config, head, 0.5), "qk_norm": bool(config.use_qk_norm)}
    return {**fields, **own, "mixture": mixture}
