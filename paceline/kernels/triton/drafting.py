"""Drafts by lookup, budgets, and the paths of trees, where only the device knows them: one launch each.

To the bit the tensor code of `drafters/ngram.py`, `DraftContext.make_budgets`, `Proposal.cut` and `tree.paths`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rounds import Lookup, Tables
from paceline.kernels.triton.device import PDL, begin, launching

BLOCK = 2048  # positions that are searched at a time
NODES = 8  # of a program that finds paths

_UPPER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _depths(text, length, prompt, at, MOST: tl.constexpr, REFERENCE: tl.constexpr):
    """How many tokens before each position equal the last ones of the text."""
    alive, depth = at >= 0, at * 0
    for back in tl.static_range(1, MOST + 1):
        alive = alive & (at >= back) & (at < length)
        alive = alive & (tl.load(text + at - back, alive, 0) == tl.load(text + tl.maximum(length - back, 0)))
        depth += alive.to(tl.int64)
    if REFERENCE:  # only output is looked up; a match in the output begins at the last prompt token or later
        behind = at - prompt + 1
        depth = tl.where(behind > 0, tl.minimum(depth, behind), depth)
        depth = tl.minimum(depth, length - prompt)
    return depth


@triton.jit
def _find(text, length, prompt, MOST: tl.constexpr, REFERENCE: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest depth and the earliest place that has it, as one number: depth above place."""
    stop = length
    if REFERENCE:
        stop = length - 1
    best = tl.full([], 0, tl.int64)
    start = tl.full([], 0, tl.int64)
    while (start < stop) & ((best >> 32) < MOST):  # of the deepest the first wins
        at = start + tl.arange(0, BLOCK)
        depth = tl.where(at < stop, _depths(text, length, prompt, at, MOST, REFERENCE), 0)
        best = tl.maximum(best, tl.max(tl.where(depth > 0, (depth << 32) | (_UPPER - at), 0), 0))
        start += BLOCK
    return best


@triton.jit
def _keep_pace(pace, slot, slots, length, size, nodes):
    """How many a sequence gets, by what became of its last proposal: [3, S+1] counts, sizes and lengths."""
    count, before = tl.load(pace + slot), tl.load(pace + slots + slot)
    accepted = length - tl.load(pace + 2 * slots + slot) - 1
    moved = tl.minimum(tl.maximum(tl.where(accepted >= before, count + 2, count - 1), 1), nodes)
    count = tl.where(before > 0, moved, count)
    size = tl.minimum(size, count)
    tl.debug_barrier()  # all warps have read before one writes
    tl.store(pace + slot, count)
    tl.store(pace + slots + slot, size)
    tl.store(pace + 2 * slots + slot, length)
    return size


@triton.jit(
    do_not_specialize=["table_row", "count_stride", "num_slots", "nodes", "most", "least"],
    do_not_specialize_on_alignment=["slots", "budgets", "table", "lengths", "prompts", "pace", "out"],
)
def _look_up_kernel(
    slots, budgets, table, lengths, prompts, pace, out, table_row, count_stride, num_slots, nodes, most, least,
    MATCH: tl.constexpr, REFERENCE: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    text = table + slot * table_row
    length, prompt = tl.load(lengths + slot * count_stride), tl.load(prompts + slot * count_stride)
    best = _find(text, length, prompt, MATCH, REFERENCE, BLOCK)
    source, stop = _UPPER - (best & _UPPER), length
    if REFERENCE:  # the newest token is never copied, nor from one into the other
        stop = tl.where(source < prompt, prompt, length - 1)
    size = tl.minimum(stop - source, tl.minimum(tl.load(budgets + row), nodes))
    size = tl.where((best >> 32) >= least, size, 0)
    if pace is not None:
        size = _keep_pace(pace, slot, num_slots, length, size, most)
    place = tl.arange(0, NODES)
    here = out + row * (2 * nodes + 1)
    tl.store(here + place, tl.load(text + source + place, place < size, 0), place < nodes)
    tl.store(here + nodes + place, tl.where(place < size, place - 1, -2).to(tl.int64), place < nodes)
    tl.store(here + 2 * nodes, size)


def look_up(slots: Tensor, budgets: Tensor, lookup: Lookup, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Chains [B, N] copied from where the last tokens of slots [B] stood before: tokens, parents, sizes [B]."""
    batch, nodes = len(slots), lookup.nodes
    out = torch.empty((batch, 2 * nodes + 1), dtype=torch.int64, device=slots.device)
    assert tables.lengths.stride(0) == tables.prompts.stride(0), "the columns of one table"
    numbers = (tables.tokens.stride(0), tables.lengths.stride(0), len(tables.tokens), nodes, lookup.max_nodes)
    _look_up_kernel[(batch,)](
        *(slots, budgets, tables.tokens, tables.lengths, tables.prompts, lookup.pace, out, *numbers, lookup.min_match),
        MATCH=lookup.max_match,
        REFERENCE=lookup.reference,
        NODES=triton.next_power_of_2(nodes),
        BLOCK=min(BLOCK, triton.next_power_of_2(tables.max_length)),
        PDL=PDL,
        **launching(8),
    )
    return out[:, :nodes], out[:, nodes : 2 * nodes], out[:, 2 * nodes]


@triton.jit(
    do_not_specialize=["asked", "spread", "count_stride", "nodes", "size_stride", "parent_row"],
    do_not_specialize_on_alignment=["each", "slots", "lengths", "limits", "sizes", "parents", "out", "kept", "long"],
)
def _budget_kernel(
    each, slots, lengths, limits, sizes, parents, out, kept, long, asked, spread, count_stride, nodes,
    size_stride, parent_row, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    length = tl.load(lengths + slot * count_stride)
    room = tl.load(limits + slot * count_stride) - length - 1 + spread
    most = tl.maximum(room, 0)
    if each is None:
        most = tl.minimum(most, asked)
    else:
        most = tl.minimum(most, tl.load(each + row))
    if sizes is not None:
        most = tl.minimum(tl.minimum(most, tl.load(sizes + row * size_stride)), nodes)
        place = tl.arange(0, NODES)
        inside = place < nodes
        parent = tl.load(parents + row * parent_row + place, inside, -2)
        tl.store(kept + row * nodes + place, tl.where(place < most, parent, -2), inside)
    if long is not None:
        tl.store(long + row, length)
    tl.store(out + row, most)


def budgets(asked: int | Tensor, slots: Tensor, tables: Tables, spread: int) -> tuple[Tensor, Tensor]:
    """[B] nodes that slots [B] have room for, no more than asked (of all, or of each); `spread` more for trees.
    And [B] how long they are."""
    out, long = torch.empty((2, len(slots)), dtype=torch.int64, device=slots.device)
    _budget(asked, slots, tables, spread, (None, None), (out, None, long))
    return out, long


def cut(
    asked: int | Tensor, slots: Tensor, tables: Tables, spread: int, sizes: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """Sizes [B] and parents [B, N] of the same trees with no more nodes than that."""
    out, kept = (torch.empty(shape, dtype=torch.int64, device=slots.device) for shape in (sizes.shape, parents.shape))
    _budget(asked, slots, tables, spread, (sizes, parents), (out, kept, None))
    return out, kept


def _budget(
    asked: int | Tensor,
    slots: Tensor,
    tables: Tables,
    spread: int,
    given: tuple[Tensor | None, Tensor | None],
    out: tuple[Tensor, Tensor | None, Tensor | None],
) -> None:
    sizes, parents = given
    if parents is not None and parents.stride(1) != 1:
        parents = parents.contiguous()
    each, number = (asked, 0) if isinstance(asked, Tensor) else (None, asked)
    shape = (0, 0, 0) if sizes is None or parents is None else (parents.shape[1], sizes.stride(0), parents.stride(0))
    _budget_kernel[(len(slots),)](
        *(each, slots, tables.lengths, tables.limits, sizes, parents, *out),
        *(number, spread, tables.lengths.stride(0), *shape),
        NODES=triton.next_power_of_2(max(shape[0], 1)),
        PDL=PDL,
        **launching(1),
    )


@triton.jit(
    do_not_specialize=["depth", "fed_row", "table_row", "count_stride", "longest"],
    do_not_specialize_on_alignment=["slots", "read", "fed", "num_fed", "table", "lengths"],
)
def _true_kernel(
    slots, read, fed, num_fed, table, lengths, depth, fed_row, table_row, count_stride, longest,
    DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    slot = tl.load(slots + tl.program_id(0))
    start, place = tl.load(read + slot), tl.arange(0, DEPTH)
    at = start + place
    inside = (place < tl.minimum(tl.load(num_fed + slot), depth)) & (at < tl.load(lengths + slot * count_stride) - 1)
    said = tl.load(table + slot * table_row + tl.minimum(at, longest), inside, -1)
    same = inside & (said == tl.load(fed + slot * fed_row + place, inside, -2))
    tl.store(read + slot, start + tl.min(tl.where(same, DEPTH, place), 0))
    tl.store(num_fed + slot, tl.zeros_like(start))


def count_true(slots: Tensor, read: Tensor, fed: Tensor, num_fed: Tensor, tables: Tables) -> None:
    """Move read [S+1] of slots [B] behind those of its own drafts, num_fed [S+1] of fed [S+1, D], that came true and
    are not the newest token; none is left to be counted."""
    depth = fed.shape[1]
    numbers = (depth, fed.stride(0), tables.tokens.stride(0), tables.lengths.stride(0), tables.max_length)
    _true_kernel[(len(slots),)](
        *(slots, read, fed, num_fed, tables.tokens, tables.lengths, *numbers),
        DEPTH=triton.next_power_of_2(depth + 1),
        PDL=PDL,
        **launching(1),  # so that nobody reads what another has written
    )


@triton.jit
def _above(parents, node):
    """A node's parent; negative behind the root, and for padding."""
    return tl.load(parents + node, node >= 0, -2)


@triton.jit(do_not_specialize=["nodes", "depth", "parent_row"], do_not_specialize_on_alignment=["parents", "out"])
def _paths_kernel(parents, out, nodes, depth, parent_row, DEPTH: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr):
    begin(PDL, True)
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, DEPTH)[None, :]
    node = (tl.program_id(1) * NODES + tl.arange(0, NODES)).to(tl.int64)[:, None]
    here = parents + row * parent_row
    own = tl.where((node < nodes) & (tl.load(here + node, node < nodes, -2) > -2), node, -2)
    deep, at = (own * 0), own
    for _ in range(DEPTH):
        deep += (at >= 0).to(tl.int64)
        at = _above(here, at)
    back = deep - 1 - place  # so many steps up from the node
    found = tl.where(back >= 0, own, -2)
    for step in range(DEPTH - 1):
        found = tl.where(step < back, _above(here, found), found)
    inside = (node < nodes) & (place < depth)
    tl.store(out + (row * nodes + node) * depth + place, found, inside)


def paths(parents: Tensor, depth: int) -> Tensor:
    """[B, N] → [B, N, depth]: for each node its ancestors by depth, itself last; -2 beyond."""
    batch, nodes = parents.shape
    if parents.stride(1) != 1:
        parents = parents.contiguous()
    out = torch.empty((batch, nodes, depth), dtype=torch.int64, device=parents.device)
    grid = (batch, triton.cdiv(nodes, NODES))
    block = triton.next_power_of_2(max(depth, 1))
    numbers = (nodes, depth, parents.stride(0))
    _paths_kernel[grid](parents, out, *numbers, DEPTH=block, NODES=NODES, PDL=PDL, **launching(1))
    return out
