"""A matrix in 8 bits, each row with a scale: half of what a product of few rows reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127
EVEN = 16  # values of a row come in so many: whole 16 bytes
ROWS = 4096  # rounded at a time


@dataclass(frozen=True)
class Int8:
    """Row n is values[n] · scales[n]."""

    values: Tensor  # [N, K] int8
    scales: Tensor  # [N] float32
    dtype: torch.dtype  # of the rows that it is multiplied with

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dense(self) -> Tensor:
        """[N, K] float32"""
        return self.values * self.scales[:, None]


Matrix = Tensor | Int8


def round_rows(matrix: Tensor) -> Matrix:
    """A matrix of 16 bits in 8. One with rows that no kernel here can read, or with what is no number, stays itself."""
    if matrix.dtype == torch.float32 or matrix.shape[1] % EVEN or not matrix.numel():
        return matrix
    values = torch.empty_like(matrix, dtype=torch.int8)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for part, rounded, scale in zip(matrix.split(ROWS), values.split(ROWS), scales.split(ROWS)):
        wide = part.float()
        scale.copy_(wide.abs().amax(1) / LARGEST)
        rounded.copy_((wide / scale[:, None]).nan_to_num(0.0).round().clamp(-LARGEST, LARGEST))
    return Int8(values, scales, matrix.dtype) if scales.isfinite().all() else matrix


def split(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """The values as they are kept, and the rows' scales if they have any."""
    return (matrix.values, matrix.scales) if isinstance(matrix, Int8) else (matrix, None)
