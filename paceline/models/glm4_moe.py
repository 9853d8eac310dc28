"""GLM-4.5: a Llama whose heads turn in part, with experts behind its first layers, one of which every row passes."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import Routing
from paceline.models import llama
from paceline.models.config import MixtureConfig, ModelConfig, is_whole
from paceline.models.layers.experts import check_biases
from paceline.models.mixture import MixtureLlama
from paceline.models.weights import Weights


class GLM4MoE(MixtureLlama):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        super().__init__(config, ops, weights, max_position)
        check_biases(self.layers, weights.under("model.layers."))
        weights.under("model.").leave_out_modules(config.num_layers)


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    dense, shared = config.first_k_dense_replace, config.n_shared_experts
    for name, value in (("first_k_dense_replace", dense), ("n_shared_experts", shared)):
        if not is_whole(value) or value < 0:
            raise CheckpointError(f"the glm4_moe config gives {name}={value!r}; allowed: a whole number from 0 on")
    routing = Routing(
        config.num_experts_per_tok,
        "sigmoid",
        bool(config.norm_topk_prob),
        float(config.routed_scaling_factor),
        config.n_group,
        config.topk_group,
    )
    width = config.moe_intermediate_size
    mixture = MixtureConfig(config.n_routed_experts, width, routing, tuple(range(dense)), shared * width)
    fields = llama.read(config)
    head = fields["head_dim"] or config.hidden_size // config.num_attention_heads
    own = {"head_dim": head, "rotary_dim": llama.read_rotary(config, head, 0.5), "qk_norm": bool(config.use_qk_norm)}
    return {**fields, **own, "mixture": mixture}
