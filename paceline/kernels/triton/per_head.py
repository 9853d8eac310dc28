"""Each head of a row through a matrix of its own: DeepSeek's, whose heads look at one latent row.

As in `product.py` every value is one float32 sum over k in ascending order, rounded once: a row's bits depend on
nothing but the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton.device import INTERPRETED, PDL, begin, launching
from paceline.kernels.triton.product import dot

ROWS = 64  # of a tile, at most


def per_head(x: Tensor, weight: Tensor, num_heads: int) -> Tensor:
    """[T, heads · (C + K)] → [T, heads · (C + N)]: a head's first C values as they are, the others times its matrix.

    weight [heads · N, K], one matrix under another.
    """
    depth, width = weight.shape[1], weight.shape[0] // num_heads
    kept = x.shape[1] // num_heads - depth
    if x.dtype != weight.dtype or kept < 0 or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(
            f"heads [T, {num_heads} · (C + K)] need matrices [N, K] of their dtype; given {x.dtype} {tuple(x.shape)} "
            f"and {weight.dtype} {tuple(weight.shape)}"
        )
    out = torch.empty(len(x), num_heads * (kept + width), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    rows = max(16, min(ROWS, triton.next_power_of_2(len(x))))
    narrow = x.dtype == torch.float32  # no tensor cores: what threads hold is the limit
    n, k = (32, 32) if narrow else (64, 64)
    blocks = triton.cdiv(width, n)
    _per_head[(blocks + triton.cdiv(kept, n), num_heads, triton.cdiv(len(x), rows))](
        x, weight, out, len(x), x.stride(0), weight.stride(0), blocks,
        KEPT=kept, N=width, K=depth, HEADS=num_heads, BLOCK_M=rows, BLOCK_N=n, BLOCK_K=k,
        STEPS=triton.cdiv(depth, k) if INTERPRETED else 0, PDL=PDL, WIDEN=INTERPRETED,
        **launching(4, 2 if narrow else 4),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _per_head(
    x, w, out, T, x_stride, w_stride, blocks, KEPT: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program has some columns of one head's result, of some rows; those behind the `blocks` copy what is kept."""
    begin(PDL)
    block, head = tl.program_id(0), tl.program_id(1)
    rows = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    there = (rows < T)[:, None]
    x_at = x + rows[:, None] * x_stride + head * (KEPT + K)
    out_at = out + rows[:, None] * (HEADS * (KEPT + N)) + head * (KEPT + N)
    if block < blocks:
        cols, lanes = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        w_at = w + (head * N + tl.minimum(cols, N - 1)).to(tl.int64)[None, :] * w_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(STEPS if STEPS > 0 else tl.cdiv(K, BLOCK_K)):
            at = step * BLOCK_K + lanes
            if K % BLOCK_K == 0:
                a = tl.load(x_at + KEPT + at[None, :], mask=there, other=0.0)
                b = tl.load(w_at + at[:, None])
            else:
                a = tl.load(x_at + KEPT + at[None, :], mask=there & (at < K)[None, :], other=0.0)
                b = tl.load(w_at + at[:, None], mask=(at < K)[:, None], other=0.0)
            acc = dot(a, b, acc, WIDEN)
        tl.store(out_at + KEPT + cols[None, :], acc.to(out.dtype.element_ty), mask=there & (cols < N)[None, :])
    else:
        cols = (block - blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = there & (cols < KEPT)[None, :]
        tl.store(out_at + cols[None, :], tl.load(x_at + cols[None, :], mask=mask, other=0.0), mask=mask)
