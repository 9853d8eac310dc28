"""A batch of fixed size whose places are filled anew for every round: what a captured round is packed by.

`Places` follow from counts, and a captured round cannot ask for those again. So here they lie in one buffer on the
device, at the same addresses every time, and the host sends what a round differs in from the one before: often nothing.

    rows        sequence after sequence as in any batch, then rows of nobody
    sequences   those that sample first, then prompt chunks that do not; what is left belongs to nobody
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.ops import RowTiles, Span
from paceline.models.batch import Array, Places, Shape

LONG = 128  # rows of a prompt chunk that are looked at together


class Size(NamedTuple):
    """Of a captured round."""

    rows: int
    sampling: int  # sequences that sample, at most
    chunks: int  # and prompt chunks that do not
    nodes: int  # drafts of a sequence, at most
    mixed: bool = False  # one that samples may have more rows than its newest token and so many drafts

    @property
    def sequences(self) -> int:
        """The last is always nobody's: rows that are left over are its."""
        return self.sampling + self.chunks + 1

    @property
    def short_tiles(self) -> int:
        """Tiles of few rows: one for each sequence but nobody, at whose rows nobody looks."""
        return self.sampling + self.chunks

    @property
    def sampled(self) -> int:
        return self.sampling * (1 + self.nodes)

    @property
    def long_tiles(self) -> int:
        """Tiles of prompt chunks: none where every sequence has its newest token and its nodes alone."""
        return -(-self.rows // LONG) + self.sequences if self.chunks or self.mixed else 0

    @classmethod
    def exact(cls, shape: Shape, num_sampling: int) -> Size:
        """Of a round that is not captured: nothing is left over."""
        nodes = max([nodes for _, nodes in shape[:num_sampling]], default=0)
        mixed = any(sum(rows) > 1 + nodes for rows in shape[:num_sampling])
        return cls(sum(map(sum, shape)), num_sampling, len(shape) - num_sampling, nodes, mixed)


@dataclass
class FrameInput:
    """What differs from round to round beside the shape; [B] each."""

    slots: list[int]
    starts: list[int | None]  # None: wherever the device says its newest token stands
    budgets: list[int]  # of those that sample
    new: list[bool]  # seen by the drafter for the first time, and not from its beginning


class Frame(Places):
    """Places in fixed memory. What the host asks of a batch's places it asks the round's own, not these."""

    grid = None

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self._device = size, device
        self.num_sampling, self.num_nodes = size.sampling, size.nodes
        self.shape: Shape = ()
        self.own_spans: list[Span] = []  # for kernels that look at spans, where the round is not captured
        lengths = _lengths(size)
        self._buffer = torch.zeros(sum(lengths.values()), dtype=torch.int64, device=device)
        part: dict[str, Tensor] = dict(zip(lengths, torch.split(self._buffer, list(lengths.values()))))
        self.owner, self.offset, self.node = part["owner"], part["offset"], part["node"]  # [T]
        self.counts, self.firsts = part["counts"], part["firsts"]  # [B]
        self.sampled, self.index = part["sampled"], part["index"].view(size.sampling, 1 + size.nodes)
        self.slots, self.starts, self.new = part["slots"], part["starts"], part["new"]  # [B]
        self.drafting, self.budgets = part["drafting"], part["budgets"]  # [sequences that may sample]
        self.tiles = [RowTiles(part["short_first"], part["short_count"], 1 + size.nodes)]
        if size.long_tiles:
            self.tiles.append(RowTiles(part["long_first"], part["long_count"], LONG, True, size.sequences))
        self._filled: tuple[Any, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.size.rows

    def spans(self, reaches: list[int]) -> list[Span]:
        return self.own_spans

    @property
    def roots(self) -> Tensor:
        return self.sampled.view(self.index.shape)[:, 0]  # a view: every seat has its own sampled rows

    @property
    def sampled_owner(self) -> Tensor:
        """Rows that are sampled for nobody may be anybody's."""
        return self.owner[self.sampled].clamp(max=self.size.sampling - 1)

    @property
    def sampled_node(self) -> Tensor:
        return self.node[self.sampled]

    def fill(self, shape: Shape, num_sampling: int, given: FrameInput, table: Slots) -> None:
        """Send what this round differs in from the last that was filled in."""
        if self._filled == (shape, num_sampling, given):
            return
        size, number = self.size, num_sampling
        layout = _layout(shape, number, size)
        rows = np.zeros((3, size.sequences), dtype=np.int64)
        rows[0], rows[1] = table.null, -1
        starts = [-1 if start is None else start for start in given.starts]
        known: tuple[list[int] | list[bool], ...] = (given.slots, starts, given.new)
        for row, values in enumerate(known):
            rows[row, :number] = values[:number]
            rows[row, size.sampling : size.sampling + len(shape) - number] = values[number:]
        budgets = np.zeros(size.sampling, dtype=np.int64)
        budgets[:number] = given.budgets[:number]
        drafting = np.where(budgets > 0, rows[0, : size.sampling], table.null)
        moving = np.concatenate([*rows, drafting, budgets])
        sent = torch.from_numpy(np.concatenate([layout, moving]))
        self._filled = ()  # whatever interrupts here, the next round sends all
        self._buffer.copy_(sent.pin_memory() if self._buffer.is_cuda else sent, non_blocking=True)
        self._filled = shape, num_sampling, given


def _lengths(size: Size) -> dict[str, int]:
    """The buffer's parts in their order: what follows from counts (`_layout`), then what may change every round."""
    rows, seats = size.rows, size.sequences
    named = (
        (("owner", "offset", "node"), rows),
        (("counts", "firsts"), seats),
        (("sampled", "index"), size.sampled),
        (("short_first", "short_count"), size.short_tiles),
        (("long_first", "long_count"), size.long_tiles),
        (("slots", "starts", "new"), seats),
        (("drafting", "budgets"), size.sampling),
    )
    return {name: length for names, length in named for name in names}


@functools.lru_cache(maxsize=256)
def _layout(shape: Shape, num_sampling: int, size: Size) -> Array:
    """What follows from counts alone, padded: made once for a shape and a size."""
    counts, nodes = np.array(shape, dtype=np.int64).reshape(-1, 2).T
    sizes = counts + nodes
    firsts, total = sizes.cumsum() - sizes, int(sizes.sum())
    number = np.arange(len(shape))
    seat = np.where(number < num_sampling, number, number - num_sampling + size.sampling)  # among the sequences
    rows = np.zeros((3, size.rows), dtype=np.int64)
    rows[0] = size.sequences - 1
    rows[0, :total] = seat.repeat(sizes)
    rows[1, :total] = np.arange(total) - firsts.repeat(sizes)
    rows[2] = -1
    rows[2, :total] = np.arange(total) - (firsts + counts).repeat(sizes)
    by_sequence = np.zeros((2, size.sequences), dtype=np.int64)
    by_sequence[0] = 1
    by_sequence[0, seat], by_sequence[1, seat] = counts, firsts
    sampled = np.zeros((size.sampling, 1 + size.nodes), dtype=np.int64)
    last = firsts[:num_sampling] + counts[:num_sampling] - 1
    steps = np.minimum(np.arange(1 + size.nodes), nodes[:num_sampling, None])
    sampled[:num_sampling] = last[:, None] + steps
    index = np.arange(sampled.size).reshape(sampled.shape)
    return np.concatenate([*rows, *by_sequence, sampled.ravel(), index.ravel(), *_tiles(sizes, firsts, seat, size)])


def _tiles(sizes: Array, firsts: Array, seat: Array, size: Size) -> list[Array]:
    """Rows that are looked at together: all of a sequence that decodes, and so many of a prompt chunk."""
    short = np.zeros((2, size.short_tiles), dtype=np.int64)
    few = sizes <= 1 + size.nodes
    short[0, seat[few]], short[1, seat[few]] = firsts[few], sizes[few]
    listed = [
        (first + at, min(LONG, rows - at))
        for first, rows in zip(firsts[~few].tolist(), sizes[~few].tolist())
        for at in reversed(range(0, rows, LONG))  # the last see most, and begin first
    ]
    long = np.zeros((2, size.long_tiles), dtype=np.int64)
    assert len(listed) <= size.long_tiles, "a tile without a place would be left out"
    if listed:
        long[:, : len(listed)] = np.array(listed, dtype=np.int64).T
    return [*short, *long]
