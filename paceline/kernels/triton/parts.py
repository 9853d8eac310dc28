"""The product of a weight of 8 bits in parts: each warp sums one, and widens what is multiplied for it.

For few rows, whose time is a chain of additions that wait for one another: with parts it is so many times shorter. The
parts' sums are added in the end, so in another order than `product.py` has. That is a drafter's affair, and changes no
text.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.device import begin
from paceline.kernels.triton.product import dot, finish, place, prefetch_rows, read_columns, read_rows, widen

LINES = tl.constexpr(2)  # of each part of a weight row asked for before the kernel waits, if any are


@triton.jit(do_not_specialize=["T"])
def product_of_parts(
    x,  # [T, K]
    w,  # [N, K]; with a gate [2N, K]
    out,  # the rest as `product` has it
    scales, bias, residual, lines, factors, best, left_scale, left_rows, left_squares,
    T, N, K, x_stride, w_stride, residual_stride, share, eps,
    part_size,  # columns of x that a part has; of the last ones there may be fewer, or none
    EVEN: tl.constexpr, ONCE: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SUMS: tl.constexpr,
    LEFT: tl.constexpr, AHEAD: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr, WIDEN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tile_row, tile_col = place(tl.program_id(0), T, N, BLOCK_M, BLOCK_N, GROUP)
    rows, cols = tile_row * BLOCK_M + tl.arange(0, BLOCK_M), tile_col * BLOCK_N + tl.arange(0, BLOCK_N)
    STEP: tl.constexpr = BLOCK_K // PARTS
    lanes, first = tl.arange(0, STEP), tl.arange(0, PARTS)[:, None] * part_size
    there = (rows < T)[None, :, None]
    # Columns beyond the last read the last one again; nothing is stored for them.
    weight_rows = tl.minimum(cols, N - 1).to(tl.int64)
    at = first + lanes[None, :]
    x_at = x + rows.to(tl.int64)[None, :, None] * x_stride + at[:, None, :]
    w_at = w + weight_rows[None, None, :] * w_stride + at[:, :, None]
    up_at = w_at
    if GATE != "":
        up_at += N.to(tl.int64) * w_stride
    if PDL and AHEAD > 0:
        for part in tl.static_range(PARTS):
            begins = tl.minimum(part * part_size, K - 1)
            prefetch_rows(w + begins, weight_rows, w_stride, K - begins, LINES)
            if GATE != "":
                prefetch_rows(w + begins, weight_rows + N, w_stride, K - begins, LINES)
    of_columns = read_columns(scales, bias, left_scale, cols, N, GATE)
    begin(PDL)

    of_rows = read_rows(factors, residual, rows, cols, T, N, residual_stride, NORM, SUMS)
    acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((PARTS, BLOCK_M, BLOCK_N), dtype=tl.float32)
    WEIGHTS: tl.constexpr = "evict_first" if ONCE else ""
    for step in range(STEPS if STEPS > 0 else tl.cdiv(part_size, STEP)):
        column = step * STEP + lanes[None, :]
        inside = (column < part_size) & (first + column < K)
        a = tl.load(x_at, mask=there & inside[:, None, :], other=0.0, eviction_policy="evict_last")
        b = tl.load(w_at, mask=inside[:, :, None], other=0, eviction_policy=WEIGHTS)
        acc = dot(a, widen(b, a, False, WIDEN), acc, WIDEN)
        if GATE != "":
            c = tl.load(up_at, mask=inside[:, :, None], other=0, eviction_policy=WEIGHTS)
            up = dot(a, widen(c, a, False, WIDEN), up, WIDEN)
            up_at += STEP
        x_at += STEP
        w_at += STEP
    finish(
        tl.sum(acc, 0), tl.sum(up, 0), of_columns, of_rows, rows, cols, tile_col, out, scales, bias, residual, best,
        (left_rows, left_squares), T, N, share, eps, NORM, GATE, LEFT,
    )  # fmt: skip
