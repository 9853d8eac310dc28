"""A router and the experts it chooses from, as a layer of any family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.kernels.ops import Experts, Forward, Weight
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights

BIAS = "gate.e_score_correction_bias"
NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Mixture:
    """The feed-forward of a layer with experts."""

    router: Weight
    experts: Experts
    shared: tuple[Weight, Weight] | None = None  # gate and up, then down, of an expert for every row

    def __call__(self, f: Forward, x: Any) -> Any:
        mixed = f.experts(x, f.linear(x, self.router, None), self.experts)
        if self.shared is None:
            return mixed
        gate_up, down = self.shared
        return f.add(mixed, f.linear(f.gated(f.linear(x, gate_up, None), self.experts.activation), down, None))


def load_mixture(config: ModelConfig, weights: Weights, names: tuple[str, str, str] = NAMES) -> Mixture:
    """Of the view of one layer's feed-forward; `names` are an expert's matrices.

    The router keeps its bits, and so does the bias that some have: who is chosen hangs on little.
    """
    how, hidden = config.mixture, config.hidden_size
    assert how is not None, "the config has experts"
    gate, up, down = names
    router = weights.matrix(["gate.weight"], [(how.num_experts, hidden)], exact=True)
    bias = weights.whole(BIAS, (how.num_experts,), torch.float32) if weights.has(BIAS) else None
    under = weights.under("experts.")
    wide = under.experts(how.num_experts, [gate, up], (how.width, hidden), "gate_up_proj")
    narrow = under.experts(how.num_experts, [down], (hidden, how.width), "down_proj")
    experts = Experts(wide, narrow, config.activation, how.routing, bias)
    if not how.shared_width:
        return Mixture(router, experts)
    under = weights.under("shared_experts.")
    wide = under.matrix([f"{name}.weight" for name in (gate, up)], [(how.shared_width, hidden)] * 2)
    return Mixture(router, experts, (wide, under.matrix([f"{down}.weight"], [(hidden, how.shared_width)])))


def check_biases(layers: Iterable[Any], weights: Weights) -> None:
    """Routers have a bias in every layer with experts or in none; `weights` is the view of all layers."""
    found = {
        number: layer.mixture for number, layer in enumerate(layers) if getattr(layer, "mixture", None) is not None
    }
    without = [number for number, mixture in found.items() if mixture.experts.bias is None]
    if 0 < len(without) < len(found):
        raise CheckpointError(
            f"{weights.source.label} lacks the tensor {weights.prefix}{without[0]}.mlp.{BIAS}, which other layers have"
        )
