"""Products by PyTorch's library (cuBLAS), where exactness was not asked for: faster for many rows, not row-invariant.

The library chooses how it sums by how many rows there are, so a row's last bits depend on its neighbours. What stands
around a product is done by kernels of its own. Which products are the library's is in `tiles.library`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.triton import matmul as exact
from paceline.kernels.triton import rows as row_kernels
from paceline.kernels.triton.int8 import Int8, Matrix
from paceline.kernels.triton.matmul import Folded, Norm
from paceline.kernels.triton.tiles import prefers_library


def matmul(
    x: Tensor | Folded,
    weight: Matrix,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
    left: Folded | None = None,
) -> Tensor:
    """As the one in `matmul.py`, by whoever is the faster; the library's results are rounded at every step.

    Few rows between which norms are made on the way are ours: the library would make them apart.
    """
    if isinstance(x, Folded) or isinstance(weight, Int8) or left is not None:
        return exact.matmul(x, weight, bias, norm, residual, gate, left)
    if not prefers_library(len(x), exact.shape_of(x, weight, gate is not None, norm), x.dtype):
        return exact.matmul(x, weight, bias, norm, residual, gate)
    return product(x, weight, bias, norm, residual, gate)


def room_behind(x: Tensor | Folded, weight: Matrix, norm: Norm) -> Folded | None:
    """As the one in `matmul.py`; none where the library does the product faster."""
    rows = exact.given_rows(x)
    if isinstance(weight, Tensor) and prefers_library(len(rows), exact.shape_of(x, weight, False, None), rows.dtype):
        return None
    return exact.room_behind(x, weight, norm)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, residual: Tensor | None, gate: str | None
) -> Tensor:
    """The library's own."""
    given = x if norm is None else row_kernels.rms_norm(x, norm.weight, norm.eps)
    if residual is not None and gate is None and bias is None:
        return torch.addmm(residual, given, weight.T)  # rounded once
    made = torch.mm(given, weight.T) if bias is None else torch.addmm(bias.to(x.dtype), given, weight.T)
    if gate is not None:
        made = row_kernels.gated(made, gate)
    return made if residual is None else made + residual
