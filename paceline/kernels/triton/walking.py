"""Verdicts: the target's choices followed down the trees, committed, and laid out for the host, in one launch.

A program has one sequence. To the bit `sampling/verify.walk`, `Slots.commit` and `Report.of`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.ops import Layout
from paceline.kernels.rounds import Tables, Trees
from paceline.kernels.triton.device import PDL, begin, launching
from paceline.kernels.triton.keys import decided
from paceline.kernels.triton.picking import decide

MOST_KEYS = 1024  # of a sequence; more are worth a launch of their own


@triton.jit
def _agree(choice, token, fits, BLOCK: tl.constexpr):
    """A chain's tokens and nodes, and how many were accepted: up to the first that differs."""
    place = tl.arange(0, BLOCK)
    count = tl.min(tl.where(fits & (token == choice), BLOCK, place), 0).to(tl.int64)
    return tl.where(place <= count, choice, -1), tl.where(place < count, place, -1).to(tl.int64), count


@triton.jit
def _descend(choice, token, parent, fits, BLOCK: tl.constexpr):
    """The same of a tree: from where it stands to the first child with the token that is wanted."""
    place = tl.arange(0, BLOCK)
    count = tl.full([], 0, tl.int64)
    wanted = tl.sum(tl.where(place == 0, choice, 0), 0)
    said, nodes = tl.where(place == 0, wanted, -1), tl.where(place < 0, choice, -1)
    hit = tl.min(tl.where(fits & (parent == -1) & (token == wanted), place, BLOCK), 0)
    while hit < BLOCK:
        wanted = tl.sum(tl.where(place == hit + 1, choice, 0), 0)
        nodes = tl.where(place == count, hit, nodes)
        count += 1
        said = tl.where(place == count, wanted, said)
        hit = tl.min(tl.where(fits & (parent == hit) & (token == wanted), place, BLOCK), 0)
    return said, nodes, count


_POINTERS = [
    *("choices", "index", "tokens", "parents", "sizes", "scratch", "origins", "out", "slots", "table", "lengths"),
    "limits",
]
_NUMBERS = ["parts", "nodes", "width", "token_row", "parent_row", "size_stride", "table_row", "count_stride"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _walk_kernel(
    choices,
    index,
    tokens,
    parents,
    sizes,
    scratch,
    origins,
    out,
    slots,
    table,
    lengths,
    limits,
    parts,
    nodes,
    width,
    token_row,
    parent_row,
    size_stride,
    table_row,
    count_stride,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL, True)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < nodes
    # All of it is on its way at once: choices alone wait for where they stand, and lengths for whose they are.
    at = tl.load(index + row * (nodes + 1) + place, place <= nodes, 0)
    token = tl.load(tokens + row * token_row + place, inside, -1)
    size = tl.load(sizes + row * size_stride)
    if scratch is not None:
        unfit = tl.load(scratch + row * nodes + place, inside, 0)
    if not CHAIN:
        parent = tl.load(parents + row * parent_row + place, inside, -2)
    if slots is not None:
        slot = tl.load(slots + row)
        length = tl.load(lengths + slot * count_stride)
        limit = tl.load(limits + slot * count_stride)
    if PARTS == 0:
        choice = tl.load(choices + at, place <= nodes, -1)
    else:
        part = tl.arange(0, PARTS)[None, :]
        choice = decided(choices + at[:, None] * parts + part, (place <= nodes)[:, None] & (part < parts))
    fits = inside
    if scratch is not None:
        fits = fits & (unfit == 0)
    here = out + row * width
    rest = here + 2 * nodes + 3 + place
    if CHAIN:
        said, accepted, count = _agree(choice, token, fits & (place < size), BLOCK)
    else:
        said, accepted, count = _descend(choice, token, parent, fits, BLOCK)
        tl.store(rest, parent, inside)
        rest += nodes
        if scratch is not None:
            tl.store(rest, unfit.to(tl.int64), inside)
            rest += nodes
    if origins is not None:
        tl.store(rest, tl.load(origins + row * nodes + place, inside, 0), inside)
    tl.store(here + place, said, place <= nodes)
    tl.store(here + nodes + 1 + place, accepted, inside)
    tl.store(here + 2 * nodes + 1, count)
    tl.store(here + 2 * nodes + 2, size)
    if slots is not None:
        grown = tl.maximum(tl.minimum(count + 1, limit - length), 0)
        tl.store(table + slot * table_row + length + place, tl.maximum(said, 0), place < grown)
        tl.store(lengths + slot * count_stride, length + grown)


def walk(choices: Tensor, index: Tensor, trees: Trees, slots: Tensor | None, tables: Tables) -> Tensor:
    """[B, W]: tokens [N+1], nodes [N], how many were accepted, the size; of trees parents and scratch; origins.

    choices: [R], or [R, parts] the keys that name them (`picking`).
    """
    batch, nodes = trees.tokens.shape
    block, parts = triton.next_power_of_2(nodes + 1), choices.shape[1] if choices.dim() == 2 else 0
    if parts and block * triton.next_power_of_2(parts) > MOST_KEYS:
        choices, parts = decide(choices), 0
    out = torch.empty((batch, trees.width), dtype=torch.int64, device=choices.device)
    tokens, parents = (part if part.stride(1) == 1 else part.contiguous() for part in (trees.tokens, trees.parents))
    flags = None if trees.scratch is None else trees.scratch.contiguous().view(torch.uint8)
    origins = None if trees.origins is None else trees.origins.contiguous()
    strides = (tokens.stride(0), parents.stride(0), trees.sizes.stride(0))
    assert tables.lengths.stride(0) == tables.limits.stride(0), "the columns of one table"
    _walk_kernel[(batch,)](
        *(choices, index.contiguous(), tokens, parents, trees.sizes, flags, origins, out),
        *(slots, tables.tokens, tables.lengths, tables.limits),
        *(parts, nodes, trees.width, *strides, tables.tokens.stride(0), tables.lengths.stride(0)),
        CHAIN=trees.chain,
        BLOCK=block,
        PARTS=triton.next_power_of_2(parts) if parts else 0,
        PDL=PDL,
        **launching(1),  # so that nobody reads a length that another has written
    )
    return out


@triton.jit(
    do_not_specialize=["depth", "row_stride", "root_stride", "places", "page_row", "null"],
    do_not_specialize_on_alignment=["nodes", "roots", "slots", "positions", "pages", "out"],
)
def _moves_kernel(
    nodes, roots, slots, positions, pages, out, depth, row_stride, root_stride, places, page_row, null,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < depth
    root = tl.load(roots + row * root_stride)
    node = tl.load(nodes + row * row_stride + place, inside, -1)
    moved = (node >= 0) & (node != place)
    slot = tl.where(moved, tl.load(slots + root), null)
    base = tl.load(positions + root) + 1
    source, target = tl.where(moved, base + node, 0), tl.where(moved, base + place, 0)
    page = tl.load(pages + slot * page_row + source // SIZE, inside, 0)
    tl.store(out + row * depth + place, page * SIZE + source % SIZE, inside)
    page = tl.load(pages + slot * page_row + target // SIZE, inside, 0)
    tl.store(out + places + row * depth + place, page * SIZE + target % SIZE, inside)


def moves(nodes: Tensor, roots: Tensor, layout: Layout) -> Tensor:
    """[2, B, D] cache rows, from where to where accepted nodes [B, D] below the rows `roots` [B] move."""
    batch, depth = nodes.shape
    out = torch.empty((2, batch, depth), dtype=torch.int64, device=nodes.device)
    pages, nodes = layout.page_table, nodes if nodes.stride(1) == 1 else nodes.contiguous()
    numbers = (depth, nodes.stride(0), roots.stride(0), batch * depth, pages.stride(0), len(pages) - 1)
    tensors = (nodes, roots, layout.slots, layout.positions, pages, out)
    sizes = {"SIZE": layout.block_size, "BLOCK": triton.next_power_of_2(max(depth, 1))}
    _moves_kernel[(batch,)](*tensors, *numbers, **sizes, PDL=PDL, **launching(1))
    return out
