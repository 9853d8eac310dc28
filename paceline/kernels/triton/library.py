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
from paceline.kernels.triton.matmul import Norm
from paceline.kernels.triton.tiles import prefers_library


def matmul(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
) -> Tensor:
    """As the one in `matmul.py`, by whoever is the faster; the library's results are rounded at every step."""
    shape = exact.shape_of(x, weight, gate is not None, norm)
    if isinstance(weight, Int8) or not prefers_library(len(x), shape, x.dtype):
        return exact.matmul(x, weight, bias, norm, residual, gate)
    return product(x, weight, bias, norm, residual, gate)


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
