"""Arithmetic that several kernels share, in an order that no tile size, warp count or layout can change."""

from __future__ import annotations

import triton
import triton.language as tl

LANES = 128  # a row's squares are summed in so many lanes: lane j has columns j, j + 128, … in ascending order


@triton.jit
def pairs(v, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 2 · WIDTH] → [ROWS, WIDTH]: neighbours added."""
    first, second = tl.split(tl.reshape(v, (ROWS, WIDTH, 2)))
    return first + second


@triton.jit
def sum_lanes(v, ROWS: tl.constexpr):
    """[ROWS, 128] → [ROWS] by neighbours. (`tl.sum` adds in an order that depends on how threads hold the values.)"""
    v = pairs(v, ROWS, 64)
    v = pairs(v, ROWS, 32)
    v = pairs(v, ROWS, 16)
    v = pairs(v, ROWS, 8)
    v = pairs(v, ROWS, 4)
    v = pairs(v, ROWS, 2)
    v = pairs(v, ROWS, 1)
    return tl.reshape(v, (ROWS,))


@triton.jit
def factor_of(squares, share, eps, ROWS: tl.constexpr):
    """An rms norm's factor by the squares of its columns in 128 lanes; share: one over their number."""
    return tl.rsqrt(sum_lanes(squares, ROWS) * share + eps)


@triton.jit
def row_factor(x, y, eps, K: tl.constexpr):
    """The factor of one row of K values at x (with y: of x + y), the same as of many rows at once: [1]."""
    lanes = tl.arange(0, 128)[None, :]
    squares = tl.zeros((1, 128), dtype=tl.float32)
    for step in tl.static_range((K + 127) // 128):
        at = step * 128 + lanes
        values = tl.load(x + at, mask=at < K, other=0.0)
        if y is not None:
            values = add(values, tl.load(y + at, mask=at < K, other=0.0))
        wide = values.to(tl.float32)
        squares += wide * wide
    return factor_of(squares, 1.0 / K, eps, 1)


@triton.jit
def add(x, y):
    """In float32, in x's dtype."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


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
