"""Linears by the way they are cut over ranks. One rank today; the cuts are made where weights are read.

Column-parallel weights lose rows (outputs), row-parallel ones columns (inputs), the vocabulary its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels import Ops
from paceline.kernels.ops import Weight


@dataclass(frozen=True)
class Shard:
    """Which part of every weight this process holds."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> slice:
        """This rank's part of `total` rows or columns; they must divide evenly."""
        if total % self.size:
            raise ValueError(f"{total} does not divide over {self.size} ranks")
        step = total // self.size
        return slice(self.rank * step, (self.rank + 1) * step)


class ColumnParallel:
    """y = x Wᵀ + b, this rank's rows of W: its own outputs, nothing to reduce."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self.ops, self.weight, self.bias = ops, Weight(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class RowParallel(ColumnParallel):
    """y = x Wᵀ + b, this rank's columns of W: a partial sum, whole at one rank."""


class VocabularyParallel:
    """The embedding and the head: rows are token ids. Tied models share one instance."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        self.ops, self.weight = ops, Weight(weight)

    def embed(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight.dense)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weight, None).float()
