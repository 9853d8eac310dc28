"""Arithmetic that several kernels share, in an order that no tile size, warp count or layout can change.

A row's squares are added by neighbours, and the sums of those by neighbours, as far as it goes (behind its end stand
zeros): so whoever has some of its columns can add theirs. Those of a head, or of a layer norm, are first added in 128
lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = 128  # of a head's squares, lane j has columns j, j + 128, … in ascending order; no row has more sums of groups


def group_of(width: int) -> int:
    """Neighbours of a row of so many columns whose squares are added by whoever makes them."""
    return max(8, int(triton.next_power_of_2(width)) // LANES)


@triton.jit
def sum_groups(v, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, WIDTH] → [ROWS, WIDTH // GROUP] by neighbours; all are powers of two.

    Two at a time: in which order `tl.sum` adds more depends on how threads hold them.
    """
    if GROUP == 1:
        return v
    else:
        v = tl.sum(tl.reshape(v, (ROWS, WIDTH // 2, 2)), 2)
        return sum_groups(v, ROWS, WIDTH // 2, GROUP // 2)


@triton.jit
def sum_lanes(v, ROWS: tl.constexpr):
    """[ROWS, 128] → [ROWS] by neighbours."""
    return tl.reshape(sum_groups(v, ROWS, 128, 128), (ROWS,))


@triton.jit
def factor_of(squares, share, eps, ROWS: tl.constexpr):
    """An rms norm's factor by the squares of its columns in 128 lanes; share: one over their number."""
    return tl.rsqrt(sum_lanes(squares, ROWS) * share + eps)


@triton.jit
def row_factor(x, eps, K: tl.constexpr, WIDE: tl.constexpr):
    """The factor of one row of K values at x, the same as of many rows at once: [1]."""
    GROUP: tl.constexpr = WIDE // 128 if WIDE > 1024 else 8
    at = tl.arange(0, 128)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # a group is one thread's
    wide = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    squares = sum_groups(wide * wide, 128, GROUP, GROUP)
    return factor_of(tl.reshape(squares, (1, 128)), 1.0 / K, eps, 1)


@triton.jit
def normed(wide, by, factor, dtype: tl.constexpr):
    """A norm's value before it is rounded: as a product with a norm has it, scaled values first."""
    return (wide * by).to(dtype).to(tl.float32) * factor


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """One of ops.ACTIVATIONS, in float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "gelu_new":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "gelu")
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
