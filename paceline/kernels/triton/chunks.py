"""Where attention's chunks begin and which blocks of them a program has. Device code; knows numbers alone.

Chunks are of PER blocks below block EDGE and of FAR behind it (EDGE // PER of them are near). Where programs share the
chunks of a tile, one has chunk0, chunk0 + splits, …; far0 is its first behind EDGE. Its blocks, chunk by chunk, are its
items 0, 1, …
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunks_below(end, PER: tl.constexpr, EDGE: tl.constexpr, FAR: tl.constexpr):
    """How many chunks hold the blocks below `end`: of PER blocks below block EDGE, of FAR behind it."""
    return (tl.minimum(end, EDGE) + PER - 1) // PER + (tl.maximum(end - EDGE, 0) + FAR - 1) // FAR


@triton.jit
def first_block(chunk, PER: tl.constexpr, EDGE: tl.constexpr, FAR: tl.constexpr):
    """Of a chunk."""
    NEAR: tl.constexpr = EDGE // PER
    return tl.minimum(chunk, NEAR) * PER + tl.maximum(chunk - NEAR, 0) * FAR


@triton.jit
def even_items(end, chunk0, splits, PER: tl.constexpr):
    """`items` where all chunks are of PER blocks."""
    behind = tl.maximum(end // PER - chunk0, 0)
    whole = (behind + splits - 1) // splits * PER
    return whole + tl.where((end // PER >= chunk0) & (behind % splits == 0), end % PER, 0)


@triton.jit
def items(end, chunk0, far0, splits, PER: tl.constexpr, EDGE: tl.constexpr, FAR: tl.constexpr):
    """How many blocks below `end` a program has."""
    near = even_items(tl.minimum(end, EDGE), chunk0, splits, PER)
    return near + even_items(tl.maximum(end - EDGE, 0), far0 - EDGE // PER, splits, FAR)


@triton.jit
def nth(item, chunk0, far0, splits, PER: tl.constexpr, EDGE: tl.constexpr, FAR: tl.constexpr):
    """A program's block `item`, its chunk, and which of the chunk's blocks it is."""
    behind = item - (far0 - chunk0) // splits * PER
    chunk = tl.where(behind < 0, chunk0 + item // PER * splits, far0 + behind // FAR * splits)
    inside = tl.where(behind < 0, item % PER, behind % FAR)
    return first_block(chunk, PER, EDGE, FAR) + inside, chunk, inside


@triton.jit
def one_kind(
    chunk0, splits, end, split, lowest, count, busy, PER: tl.constexpr, EDGE: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Where some of `busy` programs have several of the `count` chunks from `lowest` on: each far chunk has a program
    of its own, and the others share the near ones, if they are enough for that. Otherwise all would wait for those
    that have a near chunk besides. A program's first chunk, how many share that kind, and where its blocks end."""
    NEAR: tl.constexpr = EDGE // PER
    far = lowest + count - NEAR
    near, others = NEAR - lowest, busy - far
    apart = (busy < count) & (far > 0) & (near > 0) & (others * (FAR // PER) >= near)
    is_far = split < far
    chunk0 = tl.where(apart, tl.where(is_far, NEAR + split, lowest + split - far), chunk0)
    splits = tl.where(apart, tl.where(is_far, far, others), splits)
    return chunk0, splits, tl.where(apart & (split >= far), tl.minimum(end, EDGE), end)
