"""What every sequence has a row of: its committed tokens, its length, its limit and its pages.

A sequence owns a *slot*, one row of these tables, from admission to finish; a batch is a gather of rows. The last row
belongs to nobody: padding reads and writes there.

The tables live where the model lives. On a CPU the host sees the same memory through numpy. Elsewhere they are *apart*:
a round appends to the device's tables itself (`commit`), rounds before the host has read what was decided (`append`);
what the host alone decides (a new sequence, its pages) is collected and sent together by `flush`.
This module knows nothing of scheduling, sampling or drafting.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.rounds import Rounds, Tables

if TYPE_CHECKING:
    from paceline.cache.windowed import WindowPages

Array = np.ndarray[Any, np.dtype[np.int64]]
_LENGTH, _PROMPT, _LIMIT = range(3)
SPREAD = 64  # so many nodes of a tree may lie behind a sequence's limit: beside one another they are no deeper than it


class Table:
    """[rows, columns] integers: `host` is what the host knows, `tensor` what the device works on."""

    def __init__(self, rows: int, columns: int, device: torch.device, apart: bool) -> None:
        shared = torch.zeros(rows, columns, dtype=torch.int64)
        self.host: Array = shared.numpy()
        self.cells = self.host.data  # the same number by number: numpy takes many times as long for one
        self._apart = apart
        self.tensor = shared.clone().to(device) if apart else shared
        self._pending: list[tuple[int, int]] = []  # first place, row behind row, and how many

    def write(self, row: int, start: int, values: Any) -> None:
        """Put `values` (a sequence of ints) at columns start … of a row, for both sides."""
        self.host[row, start : start + len(values)] = values
        if self._apart:
            self._pending.append((row * self.host.shape[1] + start, len(values)))

    def flush(self) -> None:
        """Send what was written since the last flush; nothing to do where memory is shared."""
        if not self._pending:
            return
        spans, self._pending = self._pending, []
        start, count = np.array(spans).T
        places = _runs(start, count)
        packed = torch.from_numpy(np.stack([places, self.host.reshape(-1)[places]]))
        if self.tensor.is_cuda:
            packed = packed.pin_memory()  # from other memory a copy waits for every round in flight
        self.tensor.view(-1).scatter_(0, *packed.to(self.tensor.device, non_blocking=True))


@functools.lru_cache(maxsize=256)
def numbers(values: tuple[int, ...]) -> Tensor:
    """[n] on the CPU, made once: the same sequences decode round after round. Nobody writes into it."""
    return torch.tensor(values, dtype=torch.int64)


def _runs(starts: Array, counts: Array) -> Array:
    """So many numbers from each start on, one run behind the other."""
    return np.asarray(np.arange(counts.sum()) + (starts - counts.cumsum() + counts).repeat(counts))


class Slots:
    """The tables, and which slots are free. `apart`: the device's tables are not the host's memory."""

    def __init__(
        self, num_slots: int, max_model_len: int, max_pages: int, device: torch.device, apart: bool | None = None
    ) -> None:
        self.num_slots, self.device = num_slots, device
        self.apart = device.type != "cpu" if apart is None else apart
        self.null = num_slots  # the row that belongs to nobody
        self.max_length = max_model_len
        self.spread = (
            0  # nodes that may lie behind a sequence's limit; up to SPREAD, where `max_pages` has room for them
        )
        self.tokens = Table(num_slots + 1, max_model_len + 1, device, self.apart)  # the newest may lie at the limit
        self.pages = Table(num_slots + 1, max_pages, device, self.apart)
        self.windowed: WindowPages | None = None  # pages of layers with a window, where these have their own
        self.rounds: Rounds | None = None  # kernels for a round's small work; None: tensor operations
        self._counts = Table(num_slots + 1, 3, device, self.apart)
        self._counts.write(self.null, 0, (1, 1, 1))  # full: nothing is ever appended to it
        # [S+1] each: committed, of them the prompt's, and what committed tokens never exceed
        self.lengths, self.prompt_lengths, self.limits = self._counts.tensor.unbind(1)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def tables(self) -> Tables:
        counts = (self.lengths, self.prompt_lengths, self.limits)
        return Tables(self.tokens.tensor, *counts, self.pages.tensor, self.max_length)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def length(self, slot: int) -> int:
        """As far as the host knows."""
        return self._counts.cells[slot, _LENGTH]

    def known_lengths(self, slots: list[int]) -> list[int]:
        """The same of several."""
        counts = self._counts.cells
        return [counts[slot, _LENGTH] for slot in slots]

    def room(self, slot: int) -> int:
        """How many drafts in a row it has room for, as far as the host knows: the last token is the target's own."""
        return max(0, self._counts.cells[slot, _LIMIT] - self.length(slot) - 1)

    def prompt_length(self, slot: int) -> int:
        return self._counts.cells[slot, _PROMPT]

    def longest(self, slots: list[int]) -> int:
        """No sequence in these slots is longer than this."""
        if self.apart:  # the device may be ahead, and what is captured has one width
            return self.max_length
        return max((self.length(slot) for slot in slots), default=0)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        if slot in self._free:
            raise AssertionError(f"slot {slot} was given back twice")
        self._free.append(slot)

    def begin(self, slot: int, tokens: list[int], prompt_length: int, limit: int | None = None) -> None:
        """Fill a freshly taken slot with a sequence's committed tokens."""
        self.tokens.write(slot, 0, tokens)
        self._counts.write(slot, 0, (len(tokens), prompt_length, self.max_length if limit is None else limit))

    def append(self, slots: list[int], tokens: list[list[int]]) -> None:
        """What a round has decided, now that the host has read it. Where tables are apart the device knew before."""
        cells, counts = self.tokens.cells, self._counts.cells
        for slot, own in zip(slots, tokens):
            place = counts[slot, _LENGTH]
            for token in own:
                cells[slot, place] = token
                place += 1
            counts[slot, _LENGTH] = place

    def commit(self, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Append the first counts[b] of tokens [B, D] to slots [B], on the device, up to each sequence's limit."""
        lengths = self.lengths[slots]
        counts = torch.minimum(counts, self.limits[slots] - lengths).clamp(min=0)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        inside = place < counts[:, None]
        rows = torch.where(inside, slots[:, None], self.null)
        columns = torch.where(inside, lengths[:, None] + place, 0)
        self.tokens.tensor[rows, columns] = tokens.clamp(min=0)  # -1: none could be sampled; the host will end it
        self._counts.tensor[slots, _LENGTH] = lengths + counts

    def flush(self) -> None:
        for table in (self.tokens, self.pages, self._counts):
            table.flush()
        if self.windowed is not None:
            self.windowed.table.flush()

    def reset(self) -> None:
        """All slots are free."""
        self._free = list(range(self.num_slots - 1, -1, -1))
