"""Linears by the way they are cut over ranks. One rank today; the cuts are made where weights are read.

Column-parallel weights lose rows (outputs), row-parallel ones columns (inputs), the vocabulary its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.kernels.ops import Forward, Weight


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


@dataclass
class ColumnParallel:
    """y = x Wᵀ + b, this rank's rows of W: its own outputs, nothing to reduce."""

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, f: Forward, x: Any) -> Any:
        return f.linear(x, self.weight, self.bias)


class RowParallel(ColumnParallel):
    """y = x Wᵀ + b, this rank's columns of W: a partial sum, whole at one rank."""
