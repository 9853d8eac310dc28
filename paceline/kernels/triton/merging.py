"""What rows have seen of chunks: merged in ascending order, in registers or left for another program, and written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(m, total, acc, m2, total2, acc2):
    """What a row has seen, and then what the next chunk saw."""
    new = tl.maximum(m, m2)
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that saw nothing yet
    a, b = tl.exp2(m - safe), tl.exp2(m2 - safe)
    return new, tl.fma(total, a, total2 * b), tl.fma(acc, a[:, None], acc2 * b[:, None])


@triton.jit
def leave(partial, stats, left_at, chunk, chunks, ok, m, total, acc, WIDE: tl.constexpr, WINDOW: tl.constexpr):
    """What a chunk came to, for `gather`. There is room for so many: all, or as many as a window sees at once."""
    d = tl.arange(0, acc.shape[1])
    if WINDOW > 0:
        chunk = chunk % chunks
    at = left_at * chunks + chunk
    keep = ok & (chunk < chunks)
    tl.store(stats + at * 2, m, mask=keep)
    tl.store(stats + at * 2 + 1, total, mask=keep)
    tl.store(partial + at[:, None] * WIDE + d[None, :], acc, mask=keep[:, None] & (d < WIDE)[None, :])


@triton.jit
def turn(
    partial, stats, left_at, chunk, chunks, ok, m, sums, acc, seen_m, seen_total, seen, single,
    WIDE: tl.constexpr, LEAVE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A chunk is complete: leave it or merge it, and begin afresh. single: nobody shares them, whatever may be left."""
    if LEAVE:
        if single:
            seen_m, seen_total, seen = merge(seen_m, seen_total, seen, m, tl.max(sums, 1), acc)
        else:
            leave(partial, stats, left_at, chunk, chunks, ok, m, tl.max(sums, 1), acc, WIDE, WINDOW)
    else:
        seen_m, seen_total, seen = merge(seen_m, seen_total, seen, m, tl.max(sums, 1), acc)
    m = tl.full(m.shape, float("-inf"), tl.float32)
    return m, tl.zeros(sums.shape, tl.float32), tl.zeros(acc.shape, tl.float32), seen_m, seen_total, seen


@triton.jit
def write(out_at, at, ok, total, acc, WIDE: tl.constexpr):
    """acc / total, a row for each head; zeros where a row saw nothing."""
    d = tl.arange(0, acc.shape[1])
    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    mask = ok[:, None] & (d < WIDE)[None, :]
    tl.store(out_at + at[:, None] * WIDE + d[None, :], result.to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def gather(
    out_at, at, partial, stats, left_at, chunk, end, chunks, ok,
    WIDE: tl.constexpr, WIDE_PAD: tl.constexpr, AHEAD: tl.constexpr, DEEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Merge what all chunks came to, AHEAD of them at a time: the last program of a tile does it.

    DEEP: so many turns are under way, copied ahead. Read into registers, a turn's first sums would be put between its
    reads, which then wait for one another.
    """
    d = tl.arange(0, WIDE_PAD)
    m, total = tl.full(at.shape, float("-inf"), tl.float32), tl.zeros(at.shape, tl.float32)
    acc = tl.zeros((at.shape[0], WIDE_PAD), tl.float32)
    if WINDOW == 0:
        end = tl.minimum(end, chunks)
    for some in tl.range(chunk, end, AHEAD, num_stages=DEEP):
        for i in tl.static_range(AHEAD):  # behind the end a chunk that nobody sees: it changes nothing
            there = ok & (some + i < end)
            if WINDOW > 0:
                from_at = left_at * chunks + (some + i) % chunks
            else:
                from_at = left_at * chunks + some + i
            m2 = tl.load(stats + from_at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            total2 = tl.load(stats + from_at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            mask = there[:, None] & (d < WIDE)[None, :]
            acc2 = tl.load(partial + from_at[:, None] * WIDE + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            m, total, acc = merge(m, total, acc, m2, total2, acc2)
    write(out_at, at, ok, total, acc, WIDE)
