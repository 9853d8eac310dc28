"""A batch's rows where only the device knows how far each sequence is, and what was kept of them: one launch each.

A program has ROWS rows. To the bit `models/batch.pack_rows` and `Observation`'s tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.ops import Layout
from paceline.kernels.rounds import Given, Kept, PackedRows, Rows, Tables
from paceline.kernels.triton.device import PDL, begin, launching

ROWS = 32

_POINTERS = [
    *("owner", "node", "offset", "counts", "slots", "starts", "table", "lengths", "pages", "tokens", "sizes", "paths"),
    *("ends", "lowest", "since", "out", "path"),
]
_NUMBERS = [
    *("num_rows", "table_row", "count_stride", "page_row", "token_row", "size_stride", "nodes", "depth", "null"),
    *("longest", "skipped"),
]


@triton.jit
def _begins(owner, slot, starts, lengths, count_stride, inside, NEWEST: tl.constexpr):
    """Where the rows' sequences begin: as given, or at the newest token."""
    if starts is None:
        start = tl.load(lengths + slot * count_stride, inside, 1) - 1
    else:
        start = tl.load(starts + owner, inside, 0)
        if NEWEST:
            start = tl.where(start >= 0, start, tl.load(lengths + slot * count_stride, inside, 1) - 1)
    return start


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _pack_kernel(
    owner, node, offset, counts, slots, starts, table, lengths, pages, tokens, sizes, paths, ends, lowest, since, out,
    path, num_rows, table_row, count_stride, page_row, token_row, size_stride, nodes, depth, null, longest, skipped,
    SIZE: tl.constexpr, NEWEST: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    of, at = tl.load(owner + row, inside, 0), tl.load(node + row, inside, -1)
    slot = tl.load(slots + of, inside, null)
    start = _begins(of, slot, starts, lengths, count_stride, inside, NEWEST)
    line, base = start + tl.load(offset + row, inside, 0), start + tl.load(counts + of, inside, 0)
    is_node = at >= 0
    line = tl.where(is_node, line + skipped, line)
    real = inside
    if ends is not None:
        real = real & (line < tl.load(ends + of, inside, 0))
    if since is not None:
        real = real & (line >= tl.load(since + of, inside, 0))
    if tokens is not None:
        real = real & ((at < 0) | (at < tl.load(sizes + of * size_stride, is_node, 0)))
    slot, line, base = tl.where(real, slot, null), tl.where(real, line, 0), tl.where(real, base, 1)
    ids = tl.load(table + slot * table_row + tl.minimum(line, longest), inside, 0)
    position = tl.minimum(line, longest - 1)
    if tokens is not None:
        ids = tl.where(is_node, tl.maximum(tl.load(tokens + of * token_row + at, is_node, 0), 0), ids)
        if paths is not None:
            place = tl.arange(0, DEPTH)
            hangs = (is_node & real)[:, None] & (place < depth)[None, :]
            above = tl.load(paths + ((of * nodes + at) * depth)[:, None] + place[None, :], hangs, -1)
            tl.store(path + (row * depth)[:, None] + place[None, :], above, inside[:, None] & (place < depth)[None, :])
            position = tl.minimum(base - 1 + tl.sum((above >= 0).to(tl.int64), 1), position)
    page = tl.load(pages + slot * page_row + line // SIZE, inside, 0)
    tl.store(out + row, ids, inside)
    tl.store(out + num_rows + row, slot, inside)
    tl.store(out + 2 * num_rows + row, position, inside)
    tl.store(out + 3 * num_rows + row, base, inside)
    tl.store(out + 4 * num_rows + row, line, inside)
    tl.store(out + 5 * num_rows + row, page * SIZE + line % SIZE, inside)
    if lowest is not None:
        tl.store(out + 6 * num_rows + row, tl.where(real, tl.load(lowest + of, inside, 0), 0), inside)


def pack(rows: Rows, slots: Tensor, block_size: int, tables: Tables, given: Given) -> PackedRows:
    """The rows of sequences in slots [B], wherever those stand."""
    tokens, sizes, paths = given.tokens, given.sizes, given.paths
    if tokens is None or sizes is None or not tokens.shape[1]:
        tokens = sizes = paths = None
    elif tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    paths = None if paths is None else paths.contiguous()
    count, depth = len(rows.owner), 0 if paths is None else paths.shape[2]
    fields = 6 if given.first is None else 7
    out = torch.empty((fields, count), dtype=torch.int64, device=slots.device)
    path = None if paths is None else torch.empty((count, depth), dtype=torch.int64, device=slots.device)
    strides = (tables.tokens.stride(0), tables.lengths.stride(0), tables.pages.stride(0))
    nodes = (0, 0, 0) if tokens is None or sizes is None else (tokens.stride(0), sizes.stride(0), tokens.shape[1])
    _pack_kernel[(triton.cdiv(count, ROWS),)](
        *(*rows, slots, given.starts, tables.tokens, tables.lengths, tables.pages, tokens, sizes, paths),
        *(given.ends, given.first, given.since, out, path),
        *(count, *strides, *nodes, depth, tables.null, tables.max_length, given.skipped),
        SIZE=block_size,
        NEWEST=given.newest,
        DEPTH=triton.next_power_of_2(max(depth, 1)),
        ROWS=ROWS,
        PDL=PDL,
        **launching(1 if depth < 16 else 4),
    )
    ids, own, positions, base, lines, write, *first = out.unbind()
    return PackedRows(ids, own, positions, base, lines, write, first[0] if first else None, path)


_SEEN = ["slots", "positions", "owner", "node", "nodes", "table", "lengths", "pages", "first", "kept", "out"]


@triton.jit(
    do_not_specialize=["num_rows", "depth", "node_row", "table_row", "count_stride", "page_row", "null"],
    do_not_specialize_on_alignment=_SEEN,
)
def _observe_kernel(
    slots, positions, owner, node, nodes, table, lengths, pages, first, kept, out, num_rows, depth, node_row,
    table_row, count_stride, page_row, null, SIZE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    slot, position = tl.load(slots + row, inside, null), tl.load(positions + row, inside, 0)
    length = tl.load(lengths + slot * count_stride, inside, 0)
    real = (slot != null) & (position < length - 1)
    if nodes is not None:
        at = tl.load(node + row, inside, -1)
        of = tl.load(owner + row, at >= 0, 0)
        accepted = at < 0
        for place in tl.static_range(DEPTH):  # one after the other, so that a thread has one row
            accepted = accepted | (tl.load(nodes + of * node_row + place, (at >= 0) & (place < depth), -1) == at)
        real = real & accepted
    slot, position = tl.where(real, slot, null), tl.where(real, position, 0)
    tl.store(kept + row, real.to(tl.uint8), inside)
    tl.store(out + row, slot, inside)
    tl.store(out + num_rows + row, position, inside)
    tl.store(out + 2 * num_rows + row, tl.load(table + slot * table_row + position + 1, inside, 0), inside)
    behind = tl.where(real, position + 1, 0)
    page = tl.load(pages + slot * page_row + behind // SIZE, inside, 0)
    tl.store(out + 3 * num_rows + row, behind, inside)
    tl.store(out + 4 * num_rows + row, behind + 1, inside)
    tl.store(out + 5 * num_rows + row, page * SIZE + behind % SIZE, inside)
    tl.store(out + 6 * num_rows + row, tl.where(real & (behind == length - 1), slot, null), inside)
    page = tl.load(pages + slot * page_row + position // SIZE, inside, 0)
    ends = real & (behind % SIZE == 0)
    tl.store(out + 7 * num_rows + row, tl.where(ends, page, 0), inside)
    if first is not None:
        tl.store(out + 8 * num_rows + row, tl.minimum(tl.load(first + slot, inside, 0), behind), inside)


def observe(layout: Layout, rows: Rows, nodes: Tensor | None, tables: Tables, first: Tensor | None = None) -> Kept:
    """Which rows were kept, with accepted nodes [B', D]; None: those of committed tokens alone.

    first [S+1]: the lowest position that each slot sees; None: nobody asks.
    """
    count = len(layout.slots)
    depth = 0 if nodes is None else nodes.shape[1]
    if nodes is not None and nodes.stride(1) != 1:
        nodes = nodes.contiguous()
    kept = torch.empty(count, dtype=torch.bool, device=layout.slots.device)
    out = torch.empty((8 if first is None else 9, count), dtype=torch.int64, device=layout.slots.device)
    strides = (0 if nodes is None else nodes.stride(0), tables.tokens.stride(0), tables.lengths.stride(0))
    numbers = (count, depth, *strides, tables.pages.stride(0), tables.null)
    _observe_kernel[(triton.cdiv(count, ROWS),)](
        *(layout.slots, layout.positions, rows.owner, rows.node, nodes if depth else None),
        *(tables.tokens, tables.lengths, tables.pages, first, kept.view(torch.uint8), out, *numbers),
        SIZE=layout.block_size,
        DEPTH=triton.next_power_of_2(max(depth, 1)),
        ROWS=ROWS,
        PDL=PDL,
        **launching(1),
    )
    return Kept(kept, *out.unbind())
