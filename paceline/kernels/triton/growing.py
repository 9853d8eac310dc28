"""Trees of drafts that grow where they are likely, without leaving the device: see `kernels/chain.Growing`.

A program has a sequence. Two launches a level beside network and head, as trees of one shape have: the second notes all
children, how likely each path is, and who is fed next. A last one takes the likeliest of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.chain import Drafts, Growing, Sprout
from paceline.kernels.ops import LayerCache, Ops
from paceline.kernels.triton import picking
from paceline.kernels.triton.branching import Fed, feed, level_keys, room, run, where_fed
from paceline.kernels.triton.device import PDL, begin, launching
from paceline.kernels.triton.keys import NO_KEY, finite, keys_of, named, value_of

PLACED, TOGETHER = 64, 32  # nodes that a program places, and that it compares them with at a time
MANY = 4096  # keys, or pairs of a state's values, that four warps look at

_ROOT, _PADDING = tl.constexpr(-1), tl.constexpr(-2)  # parents, as `drafters/tree.py` has them
_LEAST = tl.constexpr(-0x80000000)  # of 32 bits
_MOST = tl.constexpr(1 << 12)  # children of a level at most

_POINTERS = [
    *("keys", "sums", "names", "tokens", "parents", "scores", "numbers", "before", "slots", "starts", "most"),
    *("first", "pages", "states", "out", "path", "given", "grown"),
]
_NUMBERS = ["parts", "level", "fed", "begins", "nodes", "num_rows", "page_row", "null", "longest", "state_row"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _grow_kernel(
    keys, sums, names, tokens, parents, scores, numbers, before, slots, starts, most, first, pages, states, out, path,
    given, grown, parts, level, fed, begins, nodes, num_rows, page_row, null, longest, state_row, ROWS: tl.constexpr,
    LANES: tl.constexpr, CHILDREN: tl.constexpr, KIDS: tl.constexpr, WIDTH: tl.constexpr, SEATS: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, MANY: tl.constexpr, DEPTH: tl.constexpr,
    STATE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS nodes get children, numbered from `begins` on: `numbers` are the nodes' own, `before` their paths. Out,
    path, given and grown say who is fed next, if anybody is."""
    of, row, part = tl.program_id(0).to(tl.int64), tl.arange(0, LANES), tl.arange(0, PARTS)
    # What depends on no pick is older than the product that made the logits, and looked up at once: see `device.py`.
    inside, at = row < ROWS, (of * ROWS + row) * parts
    number, above = tl.full([LANES], _ROOT, tl.int64), tl.where(inside, 0.0, -float("inf"))
    if numbers is not None:
        number = tl.load(numbers + of * ROWS + row, inside, _PADDING, cache_modifier=".cg")
        above = tl.load(scores + of * nodes + number, number >= 0, -float("inf"), cache_modifier=".cg")
    if out is not None:
        seat = tl.arange(0, SEATS)
        limit, owner = tl.load(most + of, cache_modifier=".cg"), tl.load(slots + of, cache_modifier=".cg")
        start, line = tl.load(starts + of, cache_modifier=".cg"), fed + seat
        there, open = seat < WIDTH, line + 1 < limit
        place = where_fed(owner, start, line, open, first, pages, page_row, null, SIZE)
    begin(PDL, True)
    # All tokens together, of what each part says of itself: its greatest value, and the sum of all as shares of that.
    is_part = inside[:, None] & (part < parts)[None, :]
    greatest = value_of(tl.load(keys + (at[:, None] + part[None, :]) * CHILDREN, is_part, NO_KEY))
    greatest = tl.where(is_part & (greatest == greatest), greatest, -float("inf"))  # a NaN is in its part's sum, too
    top = finite(tl.max(greatest, 1))
    shares = tl.sum(tl.load(sums + at[:, None] + part[None, :], is_part, 0.0) * tl.exp(greatest - top[:, None]), 1)
    together = top + tl.log(tl.where(shares == 0.0, 1.0, shares))

    key, kid = tl.arange(0, KEYS)[None, :], tl.arange(0, KIDS)[None, :]
    left = tl.load(keys + at[:, None] * CHILDREN + key, inside[:, None] & (key < parts * CHILDREN), NO_KEY)
    # The halves of keys one after the other: 32 bits are compared in one go. No key's upper half is the least of all.
    high, low = (left >> 32).to(tl.int32), (left & 0xFFFFFFFF).to(tl.int32)
    best = tl.full([LANES, KIDS], NO_KEY, tl.int64)
    for child in tl.static_range(CHILDREN):
        upper = tl.max(high, 1)
        lower = tl.max(tl.where(high == upper[:, None], low, _LEAST), 1)
        next_best = (upper.to(tl.int64) << 32) | (lower.to(tl.int64) & 0xFFFFFFFF)
        best = tl.where((kid == child) & (upper > _LEAST)[:, None], next_best[:, None], best)
        high = tl.where((high == upper[:, None]) & (low == lower[:, None]), _LEAST, high)
    own, found = value_of(best) - together[:, None], named(best)
    token = tl.maximum(found, 0)
    if names is not None:
        token = tl.load(names + token)
    likely = (found >= 0) & (above > -float("inf"))[:, None] & (own == own)
    # Rounded, a node is not likelier than its parent.
    chance = tl.where(likely, above[:, None] + tl.minimum(own, 0.0), -float("inf"))
    index = row[:, None] * CHILDREN + kid
    to, is_child = of * nodes + begins + index, inside[:, None] & (kid < CHILDREN)
    tl.store(tokens + to, token, is_child)
    tl.store(parents + to, number[:, None], is_child)
    tl.store(scores + to, chance, is_child)

    if out is not None:
        # Who has a seat: as many are likelier. All at once, for one after another they would wait for each other; and
        # as they are read again, else a compiler has them made again by all threads that compare them.
        tl.debug_barrier()
        one, some = tl.arange(0, MANY), of * nodes + begins
        mine = tl.load(scores + some + one, one < ROWS * CHILDREN, -float("inf"))
        other = tl.load(scores + some + one[:, None], one[:, None] < ROWS * CHILDREN, -float("inf"))
        likelier = (other > mine[None, :]) | ((other == mine[None, :]) & (one[:, None] < one[None, :]))
        rank = tl.sum(likelier.to(tl.int32), 0)
        seated = (rank[:, None] == seat[None, :]) & (mine > -float("inf"))[:, None]
        said = tl.load(tokens + some + one, one < ROWS * CHILDREN, 0) * _MOST + one + 1
        said = tl.sum(tl.where(seated, said[:, None], 0), 0)
        chosen, said = said % _MOST - 1, said // _MOST
        real, to = (chosen >= 0) & open, of * WIDTH + seat
        feed(out + to, there, num_rows, said, real, place, tl.minimum(start + level, longest - 1), null)
        tl.store(grown + to, tl.where(real, begins + chosen, _PADDING), there)
        parent, depth = of * ROWS + tl.maximum(chosen, 0) // CHILDREN, tl.arange(0, DEPTH)[None, :]
        lines = tl.full([SEATS, DEPTH], -1, tl.int64)
        if before is not None:
            lines = tl.load(before + parent[:, None] * level + depth, depth < level, -1)
        lines = tl.where(real[:, None], tl.where(depth == level, line[:, None], lines), -1)
        tl.store(path + to[:, None] * (level + 1) + depth, lines, there[:, None] & (depth <= level))
        column = tl.arange(0, WIDE)[None, :]
        state = tl.load(states + parent[:, None] * state_row + column, column < STATE, 0.0)
        tl.store(given + to[:, None] * STATE + column, state, there[:, None] & (column < STATE))


@triton.jit
def _order_of(scores, number, there):
    """Keys of nodes, the likeliest greatest, of equals the one that was noted first."""
    score = tl.load(scores + number, there, -float("inf"))
    return tl.where(score > -float("inf"), keys_of(score, number), NO_KEY)


@triton.jit(do_not_specialize_on_alignment=["most"])
def _keep_kernel(
    tokens, parents, scores, most, kept, above, counts, DRAWN: tl.constexpr, NODES: tl.constexpr, KEEP: tl.constexpr,
    KEPT: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of all DRAWN the KEEP likeliest, each where as many are likelier; its parent is among them, and before it. A
    program places NODES of them."""
    begin(PDL, True)
    of, some = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = some * NODES + tl.arange(0, NODES)
    scores, there = scores + of * DRAWN, number < DRAWN
    parent = tl.load(parents + of * DRAWN + number, there, _PADDING)
    token = tl.load(tokens + of * DRAWN + number, there, 0)
    limit = tl.minimum(tl.load(most + of), KEEP)
    mine, theirs = _order_of(scores, number, there), _order_of(scores, parent, parent >= 0)
    rank, their_rank = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    found = tl.zeros([TOGETHER], tl.int64)
    for first in range(0, DRAWN, TOGETHER):
        other = first + tl.arange(0, TOGETHER)
        others = _order_of(scores, other, other < DRAWN)
        rank += tl.sum((others[None, :] > mine[:, None]).to(tl.int32), 1)
        their_rank += tl.sum((others[None, :] > theirs[:, None]).to(tl.int32), 1)
        found += (others > NO_KEY).to(tl.int64)
    taken = (mine > NO_KEY) & (rank < limit)
    tl.store(kept + of * KEEP + rank, token, taken)
    tl.store(above + of * KEEP + rank, tl.where(parent >= 0, their_rank, _ROOT).to(tl.int64), taken)
    if some == 0:
        count = tl.minimum(tl.sum(found, 0), limit)
        tl.store(counts + of, count)
        place = tl.arange(0, KEPT)
        empty = (place >= count) & (place < KEEP)
        tl.store(kept + of * KEEP + place, tl.zeros([KEPT], tl.int64), empty)
        tl.store(above + of * KEEP + place, tl.full([KEPT], _PADDING, tl.int64), empty)


class _Nodes(NamedTuple):
    """All that were drawn, [B, n] each."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


class _Before(NamedTuple):
    """What the nodes of a level that get children have of their own."""

    states: Tensor  # [B·P, h]
    numbers: Tensor | None  # [B·P] among all nodes; None: the root
    path: Tensor | None  # [B·P, depth]


def draw(ops: Ops, sprout: Sprout, form: Growing, caches: Sequence[LayerCache]) -> Drafts:
    """Drafts for each of B rows, by any kernels whose results stay on the device."""
    batch, width, device = len(sprout.finals), form.width, sprout.finals.device
    assert width <= form.children, "the first level has no more than a node's children"
    assert width * form.children < _MOST.value
    many = (batch, form.children * (1 + (form.levels - 1) * width))
    tokens = torch.empty(many, dtype=torch.int64, device=device)
    nodes = _Nodes(tokens, torch.empty_like(tokens), torch.empty(many, dtype=torch.float32, device=device))
    logits, before = ops.logits(sprout.finals, sprout.head), _Before(sprout.states, None, None)
    for level in range(form.levels):
        sums = picking.sums_of(logits)
        keys = level_keys(sprout, level, logits, form.children, sums)
        if level + 1 == form.levels:
            _grow(sprout, (form, level), (keys, sums), nodes, before, None)
            break
        fed, grown = room(batch * width, level + 1, before.states), tokens.new_empty(batch * width)
        _grow(sprout, (form, level), (keys, sums), nodes, before, (fed, grown))
        logits, states = run(ops, sprout, fed, width, caches)
        before = _Before(states, grown, fed.path)
    return _keep(nodes, sprout.feeding.most, form)


def _grow(
    sprout: Sprout,
    at: tuple[Growing, int],
    found: tuple[Tensor, Tensor],
    nodes: _Nodes,
    before: _Before,
    after: tuple[Fed, Tensor] | None,
) -> None:
    """Note the children of all nodes of a level that get some, and what those that grow are fed with."""
    feeding, (form, level), (keys, sums), (states, numbers, path) = sprout.feeding, at, found, before
    batch, parts, pages = len(sprout.finals), sums.shape[1], feeding.page_table
    rows, children = len(keys) // batch, form.children
    begins = 0 if level == 0 else children * (1 + (level - 1) * form.width)
    (fields, paths, given), grown = ((None, None, None), None) if after is None else after
    # Of a single lane all threads would go through all keys.
    lanes, many = triton.next_power_of_2(max(rows, 2)), triton.next_power_of_2(parts * children)
    seats, wide = triton.next_power_of_2(form.width), triton.next_power_of_2(states.shape[1])
    sizes = (parts, level, level * form.width, begins, nodes.tokens.shape[1], batch * form.width)
    _grow_kernel[(batch,)](
        *(keys, sums, sprout.ids, *nodes, numbers, path, *feeding[:5], states, fields, paths, given, grown),
        *(*sizes, pages.stride(0), len(pages) - 1, sprout.longest, states.stride(0)),
        ROWS=rows,
        LANES=lanes,
        CHILDREN=children,
        KIDS=triton.next_power_of_2(children),
        WIDTH=form.width,
        SEATS=seats,
        SIZE=feeding.block_size,
        PARTS=triton.next_power_of_2(parts),
        KEYS=many,
        MANY=triton.next_power_of_2(rows * children),
        DEPTH=triton.next_power_of_2(level + 1),
        STATE=states.shape[1],
        WIDE=wide,
        PDL=PDL,
        **launching(4 if max(lanes * many, seats * wide // 2) <= MANY else 16),
    )


def _keep(nodes: _Nodes, most: Tensor, form: Growing) -> Drafts:
    (batch, many), keep = nodes.tokens.shape, form.nodes
    kept = torch.empty((batch, keep), dtype=torch.int64, device=most.device)
    above, counts = torch.empty_like(kept), torch.empty_like(most)
    _keep_kernel[(batch, triton.cdiv(many, PLACED))](
        *(*nodes, most, kept, above, counts),
        DRAWN=many,
        NODES=PLACED,
        KEEP=keep,
        KEPT=triton.next_power_of_2(keep),
        TOGETHER=TOGETHER,
        PDL=PDL,
        **launching(4),
    )
    return Drafts(kept, counts, above, form.levels)
