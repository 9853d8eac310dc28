"""What attention's rows see, and where in the cache it lies. Device code; knows no scores."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.device import prefetch


@triton.jit
def places(base, rows, stride, PADDED: tl.constexpr, TURNED: tl.constexpr):
    """To [rows, PADDED] values of a cache part, or turned."""
    d = tl.arange(0, PADDED)
    return base + (rows[None, :] * stride + d[:, None] if TURNED else rows[:, None] * stride + d[None, :])


@triton.jit
def is_read(ok, WIDTH: tl.constexpr, PADDED: tl.constexpr, TURNED: tl.constexpr):
    """Which of those are read: of rows that are ok (None: all are), as far as WIDTH."""
    d = tl.arange(0, PADDED)
    inside = (d < WIDTH)[:, None] if TURNED else (d < WIDTH)[None, :]
    if ok is not None:
        inside = (ok[None, :] if TURNED else ok[:, None]) & inside
    return inside


@triton.jit
def fetch(base, rows, stride, ok, WIDTH: tl.constexpr, PADDED: tl.constexpr, TURNED: tl.constexpr = False):
    """Such values, zeros where none is read: 0 · NaN is NaN."""
    at = places(base, rows, stride, PADDED, TURNED)
    if ok is None and WIDTH == PADDED:
        return tl.load(at)
    return tl.load(at, is_read(ok, WIDTH, PADDED, TURNED), 0.0)


@triton.jit
def whereabouts(
    k_at, v_at, rows, ok, k_stride, v_stride, MAIN: tl.constexpr, WIDE: tl.constexpr, MAIN_PAD: tl.constexpr,
    WIDE_PAD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Where rows' keys and values lie, and which are read."""
    k_from, k_there = places(k_at, rows, k_stride, MAIN_PAD, TURNED), is_read(ok, MAIN, MAIN_PAD, TURNED)
    return k_from, k_there, places(v_at, rows, v_stride, WIDE_PAD, False), is_read(ok, WIDE, WIDE_PAD, False)


@triton.jit
def ask(base, rows, stride, WIDTH: tl.constexpr):
    """For all lines of so many values of 16 bits."""
    for line in tl.static_range((WIDTH + 63) // 64):
        prefetch(base + rows * stride + line * 64)


@triton.jit
def row_of(page, line, PAGE: tl.constexpr, SMALL: tl.constexpr):
    """A line's row of the cache, which is on that page; SMALL: no value of a head is further off than 2^31."""
    if SMALL:
        page = page.to(tl.int32)
    return page * PAGE + (line % PAGE).to(tl.int32)


@triton.jit
def within(line, lo, hi):
    """Lines that all rows share; outside of lo … hi the nearest within, so that no copy needs a mask."""
    return tl.maximum(tl.minimum(line, hi), lo).to(tl.uint32)  # divided by a shift


@triton.jit
def bounds(
    ends, firsts, t, ok, END: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, OLD: tl.constexpr = False
):
    """The lowest and the last position that rows t see."""
    CACHE: tl.constexpr = ".cg" if OLD else ""
    last = tl.load(ends + t, mask=ok, other=END - 1, cache_modifier=CACHE).to(tl.int32) - END
    lowest = last * 0
    if FIRST:
        lowest = tl.load(firsts + t, mask=ok, other=0, cache_modifier=CACHE).to(tl.int32)
    if WINDOW > 0:
        lowest = tl.maximum(lowest, last - WINDOW + 1)
    return lowest, last


@triton.jit
def members(sub, lane, count, GROUP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a tile, and which heads of the group, a program's pairs are, and whether they are there.

    ROWS: it has so many whole rows, or a part of one; 0: rows go on in the next program.
    """
    if ROWS == 0:
        pair = sub * M + lane
        row, part = pair // GROUP, pair % GROUP
        ok = row < count
    else:
        PARTS: tl.constexpr = (GROUP + M - 1) // M
        row, part = sub // PARTS * ROWS + lane // GROUP, sub % PARTS * M + lane % GROUP
        ok = (row < count) & (part < GROUP) & (lane // GROUP < ROWS)
    return row, part, ok


@triton.jit
def own_rows(
    path, table, t, lowest, last, base, p_at, depth, path_stride,
    PAGE: tl.constexpr, SMALL: tl.constexpr, OLD: tl.constexpr = False,
):  # fmt: skip
    """Where row t finds positions p_at, and which of them it sees: its ancestors have places of their own."""
    CACHE: tl.constexpr = ".cg" if OLD else ""
    d = p_at - base
    there = (p_at >= lowest) & (p_at <= last)
    at = path + t * path_stride + d
    node = tl.load(at, mask=there & (d >= 0) & (d < depth), other=-1, cache_modifier=CACHE).to(tl.int32)
    there = there & ((d < 0) | (node >= 0))
    line = tl.where(d < 0, p_at, base + node).to(tl.uint32)
    return row_of(tl.load(table + line // PAGE, mask=there, other=0, cache_modifier=CACHE), line, PAGE, SMALL), there


@triton.jit
def rows_seen_by(
    ends, firsts, bases, path, table, t, ok, p_at, depth, path_stride,
    PAGE: tl.constexpr, SMALL: tl.constexpr, END: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """`own_rows` of a row of which nothing is known yet."""
    lowest, last = bounds(ends, firsts, t, ok, END, FIRST, WINDOW)
    base = tl.load(bases + t).to(tl.int32)
    return own_rows(path, table, t, lowest, last, base, p_at, depth, path_stride, PAGE, SMALL)
