"""One forward's tensors, and where everything in them is: the only place where offsets are computed.

A batch is rows of tokens, sequence after sequence. Each sequence contributes the committed tokens it has not computed
yet (a prompt chunk, or the newest token alone) and then the nodes of its draft tree.

    sequence with 7 committed tokens, 6 computed, nodes 0, 1 (siblings) and 2 (under 0):

    row            r     r+1   r+2   r+3
    token          x_6   n_0   n_1   n_2
    node           -1    0     1     2        negative: a committed token
    position       6     7     7     8
    line           6     7     8     9        where its key lies: committed rows at their position, nodes in order
    sampled        *     *     *     *        rows whose logits decide something

Two ways to pack, one `Batch`. Ragged (`pack`): the host knows where every sequence stands and how many nodes it has,
and no row is wasted. Static (`pack_rows`): only the device knows; shapes follow from counts alone, nodes that are not
there become padding rows, which belong to the slot and the page of nobody. Everything that follows from counts alone,
for both, is answered by `Places`: who verifies, commits or observes gathers by it instead of counting again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.held import hold
from paceline.kernels.ops import Layout, RowTiles, Span
from paceline.kernels.rounds import Given, Rows

Shape = tuple[tuple[int, int], ...]  # for each sequence: committed tokens, nodes
Array = np.ndarray[Any, np.dtype[np.int64]]


class Work(NamedTuple):
    """One sequence's share of a round: `count` committed tokens from `start` on, then up to `num_nodes` nodes.

    start None: rounds are ahead of what the host knows; the newest token, wherever the device says it stands."""

    slot: int
    start: int | None
    count: int  # type: ignore[assignment]  # a tuple's own `count` is not missed
    num_nodes: int = 0


class Nodes(NamedTuple):
    """Drafts as a batch needs them; sequences behind the B have none."""

    tokens: Tensor  # [B, N]
    sizes: Tensor  # [B] nodes behind it are padding
    paths: Tensor | None  # [B, N, D] ancestors by depth; None: chains


class Places:
    """Where the parts of a batch of one shape are; its first `num_sampling` sequences sample. N is at least the most
    nodes of a sequence."""

    tiles: list[RowTiles] | None = None  # in fixed memory alone

    def __init__(self, shape: Shape, num_sampling: int, num_nodes: int, device: torch.device) -> None:
        self.shape, self.num_sampling, self.num_nodes, self._device = shape, num_sampling, num_nodes, device
        counts, nodes = (np.array(part, dtype=np.int64) for part in (zip(*shape) if shape else ((), ())))
        self._counts, self._sizes = counts, counts + nodes
        self._firsts: Array = self._sizes.cumsum() - self._sizes

    @property
    def num_rows(self) -> int:
        return int(self._sizes.sum())

    @functools.cached_property
    def owner(self) -> Tensor:
        """[T] the row's sequence."""
        return self._send(np.arange(len(self.shape)).repeat(self._sizes))

    @functools.cached_property
    def offset(self) -> Tensor:
        """[T] its place among its sequence's rows."""
        return self._send(np.arange(self.num_rows) - self._firsts.repeat(self._sizes))

    @functools.cached_property
    def node(self) -> Tensor:
        """[T] its node; negative: a committed token, -1 the newest of them."""
        return self._send(np.arange(self.num_rows) - (self._firsts + self._counts).repeat(self._sizes))

    @functools.cached_property
    def counts(self) -> Tensor:
        """[B] committed tokens of each sequence."""
        return self._send(self._counts)

    @functools.cached_property
    def rows(self) -> Rows:
        """All that kernels need of it."""
        return Rows(self.owner, self.node, self.offset, self.counts)

    @functools.cached_property
    def grid(self) -> Tensor | None:
        """[B, rows of one] where all sequences have equally many rows; else None."""
        if not self.shape or (self._sizes != self._sizes[0]).any():
            return None
        return self._send(np.arange(self.num_rows).reshape(len(self.shape), -1))

    @functools.cached_property
    def sampled_counts(self) -> list[int]:
        """For each sampling sequence how many rows are sampled: its newest committed token's, then its nodes'."""
        return [1 + nodes for _, nodes in self.shape[: self.num_sampling]]

    @functools.cached_property
    def sampled(self) -> Tensor:
        """[R] rows of the batch, sampling sequence after sampling sequence."""
        rows: list[int] = []
        for (count, nodes), first in zip(self.shape[: self.num_sampling], self.first_rows):
            rows += range(first + count - 1, first + count + nodes)
        return torch.tensor(rows, dtype=torch.int64).to(self._device)

    @functools.cached_property
    def index(self) -> Tensor:
        """[sampling sequences, 1+N] where among the sampled rows its own stand; beyond its nodes the last again."""
        counts = np.array(self.sampled_counts, dtype=np.int64)
        firsts = counts.cumsum() - counts
        return self._send(firsts[:, None] + np.minimum(np.arange(1 + self.num_nodes), counts[:, None] - 1))

    @functools.cached_property
    def roots(self) -> Tensor:
        """[sampling sequences] the row of each one's newest committed token."""
        return self.sampled[self.index[:, 0]]

    @functools.cached_property
    def sampled_owner(self) -> Tensor:
        return self.owner[self.sampled]  # [R]

    @functools.cached_property
    def sampled_node(self) -> Tensor:
        return self.node[self.sampled]  # [R]; -1: the newest committed token's row

    @functools.cached_property
    def first_rows(self) -> list[int]:
        """The first row of each sequence, on the host."""
        firsts: list[int] = self._firsts.tolist()
        return firsts

    def spans(self, reaches: list[int]) -> list[Span]:
        """Each sequence's rows, and one more than the furthest line it may touch."""
        return [Span(row, sum(size), reach) for row, size, reach in zip(self.first_rows, self.shape, reaches)]

    @functools.cached_property
    def first_sampled(self) -> list[int]:
        """Where among the sampled rows each sampling sequence's begin, and behind the last of them."""
        return [0, *np.cumsum(self.sampled_counts).tolist()]

    def _send(self, values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)


_places_of = functools.lru_cache(maxsize=128)(Places)


def places_of(shape: Shape, num_sampling: int, num_nodes: int, device: torch.device) -> Places:
    """Made once a shape: decode rounds repeat theirs."""
    return hold(_places_of(shape, num_sampling, num_nodes, device))


@dataclass
class Batch:
    ids: Tensor  # [T]
    layout: Layout
    places: Places
    slot_list: list[int] | Tensor  # [B] of each sequence
    newest: Tensor | None = None  # [T] the slots of rows that are newest tokens, else nobody's; where it was asked for

    @functools.cached_property
    def slots(self) -> Tensor:
        """[B]"""
        given = self.slot_list
        return given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)

    @property
    def positions(self) -> Tensor:
        return self.layout.positions


def pack(
    work: list[Work],
    table: Slots,
    block_size: int,
    nodes: Nodes | None = None,
    num_sampling: int | None = None,
) -> Batch:
    """Work → tensors, all of which samples unless said otherwise.

    Only where the host shares the tables: elsewhere rounds are packed by a frame (`models/frame.py`).
    """
    shape = tuple([(item.count, item.num_nodes) for item in work])
    sampling = len(work) if num_sampling is None else num_sampling
    places = places_of(shape, sampling, 0 if nodes is None else nodes.tokens.shape[1], table.device)
    drafted = nodes.tokens.tolist() if nodes is not None and any(item.num_nodes for item in work) else None
    spans: list[Span] = []
    rows: list[list[int]] = [[], [], [], [], []]
    slots, lines, bases, ids, write = rows
    for number, item in enumerate(work):
        start, size = item.start, item.count + item.num_nodes
        assert start is not None, "where tables are shared the host knows where a sequence stands"
        spans.append(Span(len(lines), size, start + size))
        line, first_page = range(start, start + size), start // block_size
        pages = table.pages.host[item.slot, first_page : (start + size - 1) // block_size + 1].tolist()
        slots += [item.slot] * size
        lines += line
        bases += [start + item.count] * size
        ids += table.tokens.host[item.slot, start : start + item.count].tolist()
        if item.num_nodes and drafted is not None:
            ids += drafted[number][: item.num_nodes]
        write += [pages[at // block_size - first_page] * block_size + at % block_size for at in line]
    slot, line_t, base, id_t, write_t = torch.from_numpy(np.array(rows, dtype=np.int64)).unbind()
    positions, path = line_t, None
    if max([span.reach for span in spans], default=0) > table.max_length:  # nodes deeper than that are drafted in vain
        positions = line_t.clamp(max=table.max_length - 1)
    if drafted is not None and nodes is not None and nodes.paths is not None:
        positions, path = _hang(places, nodes.paths, positions, base)
    layout = Layout(slot, positions, base, path, None, line_t, write_t, table.pages.tensor, block_size, spans)
    return Batch(id_t, layout, places, [item.slot for item in work])


def _hang(places: Places, paths: Tensor, straight: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Trees: each row's position, at most where a chain has it (`straight`), and its ancestors among its
    sequence's nodes [T, D]."""
    is_node = places.node >= 0
    sequence = torch.where(is_node, places.owner, 0)  # sequences behind the proposal's have no nodes
    path = torch.where(is_node[:, None], paths[sequence, places.node.clamp(min=0)], -1)
    return torch.minimum(bases - 1 + (path >= 0).sum(1), straight), path


@dataclass
class Static:
    """What else a static batch may be given."""

    reaches: list[int]  # for each sequence: no row of it touches a line at or beyond this
    nodes: Nodes | None = None
    ends: Tensor | None = None  # [B] rows whose line is at or beyond it are padding
    first: Tensor | None = None  # [B] the lowest position each may see
    since: Tensor | None = None  # [B] rows whose line is before it are padding
    skipped: int = 0  # lines between the committed tokens and these nodes: nodes of the same trees lie there
    newest: bool = False  # who starts below 0 starts at its newest token


def pack_rows(
    places: Places, slots: Tensor, starts: Tensor | None, table: Slots, block_size: int, given: Static
) -> Batch:
    """The same in tensors alone: slots and starts are [B], on the device; no starts: at everyone's newest token.
    Nothing waits for it: it can be captured."""
    if table.rounds is not None:
        return _pack_at_once(places, slots, starts, table, block_size, given)
    if starts is None or given.newest:
        newest = table.lengths[slots] - 1
        starts = newest if starts is None else torch.where(starts >= 0, starts, newest)
    owner, node, nodes = places.owner, places.node, given.nodes
    is_node = node >= 0
    start = starts[owner]
    slot, line, base = slots[owner], start + places.offset, start + places.counts[owner]
    if given.skipped:
        line = torch.where(is_node, line + given.skipped, line)
    real = None if given.ends is None else line < given.ends[owner]
    if given.since is not None:
        real = line >= given.since[owner] if real is None else real & (line >= given.since[owner])
    if nodes is not None and nodes.tokens.shape[1]:
        sequence = torch.where(is_node, owner, 0)  # sequences behind the proposal's have no nodes
        index = node.clamp(0, nodes.tokens.shape[1] - 1)
        there = ~is_node | (node < nodes.sizes[sequence])
        real = there if real is None else real & there
    if real is not None:
        slot, line, base = torch.where(real, slot, table.null), torch.where(real, line, 0), torch.where(real, base, 1)
    ids = table.tokens.tensor[slot, line.clamp(max=table.max_length)]
    positions, path = line.clamp(max=table.max_length - 1), None
    if nodes is not None and nodes.tokens.shape[1]:
        ids = torch.where(is_node, nodes.tokens[sequence, index].clamp(min=0), ids)
        if nodes.paths is not None:
            assert real is not None
            path = torch.where((is_node & real)[:, None], nodes.paths[sequence, index], -1)
            positions = torch.minimum(base - 1 + (path >= 0).sum(1), positions)
    first = None if given.first is None else given.first[owner]
    if first is not None and real is not None:
        first = torch.where(real, first, 0)
    write = table.pages.tensor[slot, line // block_size] * block_size + line % block_size
    spans, pages = places.spans(given.reaches), table.pages.tensor
    layout = Layout(slot, positions, base, path, first, line, write, pages, block_size, spans, places.grid)
    layout.tiles = places.tiles
    return Batch(ids, layout, places, slots)


def _pack_at_once(
    places: Places, slots: Tensor, starts: Tensor | None, table: Slots, block_size: int, given: Static
) -> Batch:
    """The same by kernels that do it in one launch."""
    assert table.rounds is not None
    tokens, sizes, paths = (None, None, None) if given.nodes is None else given.nodes
    asked = Given(starts, given.newest, tokens, sizes, paths, given.ends, given.first, given.since, given.skipped)
    found = table.rounds.pack(places.rows, slots, block_size, table.tables, asked)
    where = (found.slots, found.positions, found.base, found.path, found.first, found.lines, found.write)
    layout = Layout(*where, table.pages.tensor, block_size, places.spans(given.reaches), places.grid)
    layout.tiles = places.tiles
    return Batch(found.ids, layout, places, slots)


def rows_at(batch: Batch, slots: Tensor, positions: Tensor, ids: Tensor, table: Slots) -> Batch:
    """The rows of a batch, in its order, with other tokens at other places, all committed: what a drafter reads beside
    the target's own rows. slots, positions and ids are [T]; a row of the null slot is padding.

    A row's place may be one behind its own, so its sequence reaches one further.
    """
    size = batch.layout.block_size
    spans = [span._replace(reach=span.reach + 1) for span in batch.layout.spans]
    positions = torch.where(slots == table.null, 0, positions)
    write = table.pages.tensor[slots, positions // size] * size + positions % size
    grid = batch.places.grid if table.apart else None
    page_table = table.pages.tensor
    layout = Layout(slots, positions, positions + 1, None, None, positions, write, page_table, size, spans, grid)
    layout.tiles = batch.layout.tiles
    return Batch(ids, layout, batch.places, batch.slot_list)
