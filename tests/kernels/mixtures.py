"""A layer of experts as a description over named inputs, and the same in plain float64, a row at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.kernels import Ops
from paceline.kernels.ops import Experts, Forward, Inputs, Packed, Routing
from tests.kernels.tiny import CPU

HIDDEN, WIDE, EXPERTS = 32, 48, 8
ROUTINGS = {
    "mixtral": Routing(2, "softmax", True),
    "qwen3": Routing(3, "softmax", False),
    "one": Routing(1, "softmax", True),
    "all": Routing(EXPERTS, "softmax", True),
    "sigmoid": Routing(3, "sigmoid", True, 2.5),
    "groups": Routing(3, "sigmoid", True, 1.5, num_groups=4, kept_groups=2),
    "single groups": Routing(2, "sigmoid", False, num_groups=8, kept_groups=3),
}
BIASED = ("sigmoid", "groups", "single groups")


class Mixture:
    """Rows and scores come by name, so that a test decides who is chosen."""

    def __init__(
        self, name: str, ops: Ops, activation: str = "silu", packed: tuple[list[Packed], list[Packed]] | None = None
    ) -> None:
        torch.manual_seed(3)
        self.ops, self.routing = ops, ROUTINGS[name]
        gate_up: list[Any] = list(torch.randn(EXPERTS * 2, WIDE, HIDDEN) / HIDDEN**0.5)
        down: list[Any] = list(torch.randn(EXPERTS, HIDDEN, WIDE) / WIDE**0.5)
        self.bias = torch.randn(EXPERTS) / 4 if name in BIASED else None
        if packed is not None:
            gate_up, down = list(packed[0]), list(packed[1])
        self.gate_up, self.down = gate_up, down
        stacks = [ops.pack(parts, torch.float32, CPU) for parts in (gate_up, down)]
        self.experts = Experts(*stacks, activation, self.routing, self.bias)
        self.width = int(down[0].shape[0])

    def describe(self, f: Forward) -> Any:
        return f.experts(f.input("x", self.width), f.input("scores", EXPERTS), self.experts)

    def run(self, x: Tensor, scores: Tensor) -> Tensor:
        return self.ops.run(self, Inputs(None, None, {"x": x, "scores": scores}), (), (), None).final


def rows(count: int, seed: int = 0, width: int = HIDDEN) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator), torch.randn(count, EXPERTS, generator=generator)


def choose(row: list[float], routing: Routing, bias: list[float]) -> dict[int, float]:
    """A row's experts and their weights, by the sentences of `Routing`."""
    wide = torch.tensor(row, dtype=torch.float64)
    own = (wide.softmax(0) if routing.scoring == "softmax" else wide.sigmoid()).tolist()
    judged = [score + more for score, more in zip(own, bias)]
    size = len(own) // routing.num_groups
    worth = [sum(sorted(judged[g * size : (g + 1) * size])[-2:]) for g in range(routing.num_groups)]
    kept = sorted(range(routing.num_groups), key=lambda g: (-worth[g], g))[: routing.kept_groups]
    allowed = [e for e in range(len(own)) if e // size in kept]
    best = sorted(allowed, key=lambda e: (-judged[e], e))[: routing.num_chosen]
    whole = sum(own[e] for e in best) if routing.normalised else 1.0
    return {e: own[e] / whole * routing.factor for e in sorted(best)}


def by_hand(mixture: Mixture, x: Tensor, scores: Tensor) -> Tensor:
    """In float64. Only for silu."""
    dense = [
        [part if isinstance(part, Tensor) else part.dequantize() for part in s] for s in (mixture.gate_up, mixture.down)
    ]
    bias = [0.0] * EXPERTS if mixture.bias is None else mixture.bias.double().tolist()
    results = []
    for row, judged in zip(x.double(), scores.tolist()):
        total = torch.zeros_like(row)
        for expert, weight in choose(judged, mixture.routing, bias).items():
            gate, up = (dense[0][2 * expert + half].double() @ row for half in (0, 1))
            total += weight * (dense[1][expert].double() @ (gate * gate.sigmoid() * up))
        results.append(total)
    return torch.stack(results)
