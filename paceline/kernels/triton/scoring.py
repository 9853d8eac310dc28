"""What a block's keys score with attention's queries, and what becomes of scores. Device code; knows no places.

Multiply-adds are written out (`tl.fma`), so that no compiler fuses them here and not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.seeing import fetch


@triton.jit
def bend(s, inner, CAPPED: tl.constexpr):
    """tanh(s · scale / cap) under a soft cap; the cap itself is part of `factor`."""
    if CAPPED:
        s = 1.0 - 2.0 / (tl.exp2(s * inner) + 1.0)
    return s


@triton.jit
def rise(top, m, factor):
    """The new m where a block's largest scores are `top`, and the same for those that saw nothing yet."""
    new = tl.maximum(m, top * factor)
    return new, tl.where(new == float("-inf"), 0.0, new)


@triton.jit
def soften(s, m, factor):
    """Masked scores [M, BLOCK] → p, the new m, and what scales all that came before."""
    new, safe = rise(tl.max(s, 1), m, factor)
    return tl.exp2(tl.fma(s, factor, -safe[:, None])), new, tl.exp2(m - safe)


@triton.jit
def queries(
    kept, q_row, ok, MAIN_AT: tl.constexpr, MAIN: tl.constexpr, MAIN_PAD: tl.constexpr, TAIL_AT: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PAD: tl.constexpr,
):  # fmt: skip
    """[M, D] in the keys' two pieces; kept: they were read before."""
    if kept is not None:
        return kept
    d = tl.arange(0, MAIN_PAD)
    q = tl.load(q_row[:, None] + (MAIN_AT + d)[None, :], mask=ok[:, None] & (d < MAIN)[None, :], other=0.0)
    q_tail = q
    if TAIL > 0:
        e = tl.arange(0, TAIL_PAD)
        q_tail = tl.load(q_row[:, None] + (TAIL_AT + e)[None, :], mask=ok[:, None] & (e < TAIL)[None, :], other=0.0)
    return q, q_tail


@triton.jit
def score(
    q, q_tail, k, tail_at, rows, stride, ok, TAIL: tl.constexpr, TAIL_PAD: tl.constexpr, TURNED: tl.constexpr = False
):
    """q · k: over the keys' first piece, then over what is left. TURNED: keys are columns as they come, and go to a
    tensor core in one step; others would in many, but where a loop copies them ahead."""
    k = k.to(q.dtype)
    s = tl.dot(q, k if TURNED else tl.trans(k), input_precision="ieee")
    if TAIL > 0:
        tail = fetch(tail_at, rows, stride, ok, TAIL, TAIL_PAD, TURNED).to(q.dtype)
        s = tl.dot(q_tail, tail if TURNED else tl.trans(tail), s, input_precision="ieee")
    return s
