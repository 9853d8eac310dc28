"""MiMo 7B: Qwen2's model; its folders also hold modules that predict further tokens, a drafter's."""

from __future__ import annotations

from paceline.kernels import Ops
from paceline.models.config import ModelConfig
from paceline.models.llama import Llama
from paceline.models.weights import Weights


class MiMo(Llama):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        super().__init__(config, ops, weights, max_position)
        weights.leave_out("model.mtp_layers.")
