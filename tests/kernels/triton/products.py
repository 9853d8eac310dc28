"""Rows and weights to be multiplied, and what a product of them has to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.ops import activate

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def rows_of(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(device)


def whole(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers: every order of summing them is exact, so that on a CPU only places can go wrong."""
    made = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(device)


def make(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Where a device sums by itself its order is what is tested."""
    maker: Any = rows_of if device.type == "cuda" else whole
    made: Tensor = maker(device, *shape, seed=seed, dtype=torch.bfloat16)
    return made


def rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """As kernels do: Triton's interpreter cuts the bits off that bfloat16 does not have."""
    if wide.device.type == "cpu" and dtype == torch.bfloat16:
        wide = (wide.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return wide.to(dtype)


def expected(x: Tensor, weight: Tensor, **around: Any) -> Tensor:
    """The same in float64, rounded where the contract rounds."""
    given, factor = x, torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    norm = around.get("norm")
    if norm is not None:
        given = rounded(x.float() * norm.weight.float(), x.dtype)
        factor = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + norm.eps)
    made = given.double() @ weight.double().T * factor
    if around.get("bias") is not None:
        made = made + around["bias"].double()
    if around.get("gate"):
        first, second = made.chunk(2, dim=-1)
        made = activate(first, around["gate"]) * second
    if around.get("residual") is not None:
        made = made + around["residual"].double()
    return made


def check(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    size = wanted.abs().max().item() * (2 if got.device.type == "cpu" else 1)  # see `rounded`
    assert (got.double() - wanted).abs().max().item() <= size * ROUNDING[dtype] + 1e-6


def logits_best(*given: Any) -> tuple[Tensor, Tensor]:
    """The logits, and each row's best, found in what their product left."""
    from paceline.kernels.triton.matmul import logits_bests
    from paceline.kernels.triton.picking import decide

    made, keys = logits_bests(*given)
    return made, decide(keys)
