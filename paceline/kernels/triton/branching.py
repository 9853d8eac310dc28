"""Trees of drafts of one shape without leaving the device: the sisters of a level go through the network together.

Who picks notes all children of a node, and where those that grow are fed; see `kernels/chain.Branches`. Two launches a
level beside network and head, as `chaining` has for a draft that is sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.chain import Branches, Drafts, Level, Sprout
from paceline.kernels.held import hold
from paceline.kernels.ops import Head, Inputs, LayerCache, Layout, Ops, Span
from paceline.kernels.rounds import Keyed
from paceline.kernels.triton import picking
from paceline.kernels.triton.device import PDL, begin, launching
from paceline.kernels.triton.keys import named, next_of

_POINTERS = [
    *("keys", "names", "tokens", "counts", "sizes", "slots", "starts", "most", "first", "pages", "seats", "paths"),
    *("states", "out", "path", "given"),
]
_NUMBERS = ["parts", "nodes", "rows", "level", "fed", "width", "num_rows", "page_row", "null", "longest", "state_row"]


@triton.jit
def where_fed(owner, start, behind, real, first, pages, page_row, null, SIZE: tl.constexpr):
    """Slot, where nodes begin, line, cache row and the lowest position seen of a row that is fed, on the line `behind`
    where nodes begin; not real: nobody's. Some look before they have waited (`device.py`)."""
    slot, line = tl.where(real, owner, null), tl.where(real, start + behind, 0)
    page = tl.load(pages + slot * page_row + line // SIZE, cache_modifier=".cg")
    lowest = line * 0
    if first is not None:
        lowest = tl.where(real, tl.load(first + slot, cache_modifier=".cg"), 0)
    return slot, tl.where(real, start, 1), line, page * SIZE + line % SIZE, lowest


@triton.jit
def feed(out, there, num_rows, token, real, place, position, null):
    """Rows that are fed, as `Fed.fields` has them, where they are there. place: by `where_fed`, of rows that may be
    real; those that are not are nobody's."""
    slot, base, line, write, lowest = place
    tl.store(out, token, there)
    tl.store(out + num_rows, tl.where(real, slot, null), there)
    tl.store(out + 2 * num_rows, tl.where(real, position, 0), there)
    tl.store(out + 3 * num_rows, tl.where(real, base, 1), there)
    tl.store(out + 4 * num_rows, tl.where(real, line, 0), there)
    tl.store(out + 5 * num_rows, tl.where(real, write, 0), there)
    tl.store(out + 6 * num_rows, tl.where(real, lowest, 0), there)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _branch_kernel(
    keys, names, tokens, counts, sizes, slots, starts, most, first, pages, seats, paths, states, out, path, given,
    parts, nodes, rows, level, fed, width, num_rows, page_row, null, longest, state_row, SIZE: tl.constexpr,
    CHILDREN: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program has one of the `rows` nodes of a sequence that have children; out, path and given are the rows that
    are fed next, if any are."""
    begin(PDL, True)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    of, node = row // rows, row % rows
    limit = tl.load(most + of)
    if counts is not None:
        tl.store(counts + of, tl.load(sizes + tl.minimum(limit, nodes)))
    left = tl.load(keys + row * parts + part, part < parts, -0x7FFFFFFFFFFFFFFF)
    if out is not None:
        column, depth = tl.arange(0, WIDE), tl.arange(0, DEPTH)
        state = tl.load(states + row * state_row + column, column < STATE, 0.0)
        start, owner = tl.load(starts + of), tl.load(slots + of)
    for child in tl.static_range(CHILDREN):
        best, left = next_of(left)
        token = tl.maximum(named(best), 0)
        if names is not None:
            token = tl.load(names + token)
        number = tl.load(seats + (node * CHILDREN + child) * 2)
        tl.store(tokens + of * nodes + number, token, number >= 0)
        if out is not None:
            seat = tl.load(seats + (node * CHILDREN + child) * 2 + 1)
            if seat >= 0:
                real, to = fed + seat + 1 < limit, of * width + seat
                place = where_fed(owner, start, fed + seat, real, first, pages, page_row, null, SIZE)
                feed(out + to, seat >= 0, num_rows, token, real, place, tl.minimum(start + level, longest - 1), null)
                above = tl.load(paths + seat * (level + 1) + depth, depth <= level, -1)
                tl.store(path + to * (level + 1) + depth, tl.where(real, above, -1), depth <= level)
                tl.store(given + to * STATE + column, state, column < STATE)


class Fed(NamedTuple):
    """The rows of a level that are fed, [B·W] each."""

    fields: Tensor  # [7, B·W] tokens, slots, positions, bases, lines, cache rows, the lowest position seen
    path: Tensor  # [B·W, depth]
    states: Tensor  # [B·W, h]


def draw(ops: Ops, sprout: Sprout, form: Branches, caches: Sequence[LayerCache]) -> Drafts:
    """Drafts for each of B rows, by any kernels whose results stay on the device."""
    batch, device = len(sprout.finals), sprout.finals.device
    tokens = torch.empty((batch, len(form.parents)), dtype=torch.int64, device=device)
    counts = torch.empty_like(sprout.feeding.most)
    logits, states, fed = ops.logits(sprout.finals, sprout.head), sprout.states, 0
    for number, level in enumerate(form.levels):
        keys = level_keys(sprout, number, logits, level.seats.shape[1])
        width = len(level.paths)
        rows = room(batch * width, number + 1, states) if width else None
        to = (tokens, counts if number == 0 else None, form.counts)
        _branch(sprout, (number, level), keys, to, (states, fed), rows)
        if rows is None:
            break
        logits, states = run(ops, sprout, rows, width, caches)
        fed += width
    return Drafts(tokens, counts, form.parents, len(form.levels))


def run(ops: Ops, sprout: Sprout, rows: Fed, width: int, caches: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
    """The logits that children of rows that are fed, `width` of each sequence, are picked from, and what they are fed
    with, [B·W, …] each."""
    inputs = Inputs(rows.fields[0], _layout(sprout, rows, width), {sprout.state[0]: rows.states})
    hidden = ops.run(sprout.network, inputs, caches, (sprout.state[1],), Head(sprout.head, None, best=False))
    assert hidden.logits is not None and hidden.tapped is not None
    return hidden.logits, hidden.tapped


def level_keys(sprout: Sprout, number: int, logits: Tensor, children: int, sums: Tensor | None = None) -> Tensor:
    """[B·P, parts · K] of which the greatest K name the children of a level's nodes."""
    keyed, nodes = sprout.picking, len(logits) // len(sprout.finals)
    if keyed is None:
        return picking.best_keys(logits, children, sums)
    assert isinstance(keyed, Keyed)
    owners = None if nodes == 1 else hold(_owners(len(sprout.finals), nodes, logits.device))
    keyed = keyed._replace(ahead=number, ids=sprout.ids, numbers=True, rows=owners, old=True)
    return picking.sample_keys(logits, sprout.feeding.slots, sprout.feeding.starts, keyed, children, sums)


def room(rows: int, depth: int, states: Tensor) -> Fed:
    fields = torch.empty((7, rows), dtype=torch.int64, device=states.device)
    return Fed(fields, fields.new_empty((rows, depth)), states.new_empty((rows, states.shape[1])))


def _branch(
    sprout: Sprout,
    at: tuple[int, Level],
    keys: Tensor,
    noted: tuple[Tensor, Tensor | None, Tensor],
    before: tuple[Tensor, int],
    rows: Fed | None,
) -> None:
    """Note the children of all nodes of a level that have some, and what those that grow are fed with."""
    feeding, (number, level), (states, fed), (tokens, counts, sizes) = sprout.feeding, at, before, noted
    nodes, children, _ = level.seats.shape
    width, parts, pages = len(level.paths), keys.shape[1], feeding.page_table
    fields, path, given = (None, None, None) if rows is None else rows
    numbers = (parts, tokens.shape[1], nodes, number, fed, width, len(tokens) * width, pages.stride(0), len(pages) - 1)
    _branch_kernel[(len(keys),)](
        *(keys, sprout.ids, tokens, counts, sizes, *feeding[:5], *level, states, fields, path, given),
        *(*numbers, sprout.longest, states.stride(0)),
        SIZE=feeding.block_size,
        CHILDREN=children,
        PARTS=triton.next_power_of_2(parts),
        DEPTH=triton.next_power_of_2(number + 1),
        STATE=states.shape[1],
        WIDE=triton.next_power_of_2(states.shape[1]),
        PDL=PDL,
        **launching(4),
    )


def _layout(sprout: Sprout, rows: Fed, width: int) -> Layout:
    _, slots, positions, bases, lines, write, first = rows.fields.unbind()
    pages, size, batch = sprout.feeding.page_table, sprout.feeding.block_size, len(sprout.finals)
    spans = [Span(row * width, width, pages.shape[1] * size) for row in range(batch)]
    grid = hold(_grid(batch, width, slots.device))
    return Layout(slots, positions, bases, rows.path, first, lines, write, pages, size, spans, grid)


@functools.lru_cache(maxsize=64)
def _owners(batch: int, nodes: int, device: torch.device) -> Tensor:
    return torch.arange(batch * nodes, device=device) // nodes


@functools.lru_cache(maxsize=64)
def _grid(batch: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(batch * width, device=device).view(batch, width)
