"""A linear: a weight as the kernels keep it, and perhaps a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.kernels.ops import Forward, Weight


@dataclass
class Linear:
    """y = x Wᵀ + b"""

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, f: Forward, x: Any) -> Any:
        return f.linear(x, self.weight, self.bias)
