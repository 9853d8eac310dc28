"""What every sequence has a row of: its committed tokens, its length and its pages.

A sequence owns a *slot*, one row of these tables, from admission to finish; a batch is a gather of rows.
The tables live where the model lives. On a CPU the host sees the same memory through numpy; elsewhere
writes are collected and sent together by `flush`, so that no single token costs a transfer.
This module knows nothing of scheduling, sampling or drafting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Table:
    """A [rows, columns] integer table with a host copy that is always current and a device copy after `flush`."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        shared = torch.zeros(rows, columns, dtype=torch.int64)
        self.host: np.ndarray[Any, np.dtype[np.int64]] = shared.numpy()
        self._apart = device.type != "cpu"
        self.device = shared.to(device) if self._apart else shared
        self._pending: list[tuple[int, int, int]] = []

    def write(self, row: int, start: int, values: Any) -> None:
        """Put `values` (a sequence of ints) at columns start … of a row."""
        stop = start + len(values)
        if len(values) == 1:
            self.host[row, start] = values[0]
        else:
            self.host[row, start:stop] = values
        if self._apart:
            self._pending.append((row, start, stop))

    def flush(self) -> None:
        """Send what was written since the last flush; nothing to do on a CPU."""
        if not self._pending:
            return
        spans, self._pending = self._pending, []
        rows = np.concatenate([np.full(stop - start, row) for row, start, stop in spans])
        columns = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        values = self.host[rows, columns]
        packed = torch.from_numpy(np.stack([rows, columns, values])).to(self.device.device, non_blocking=True)
        self.device[packed[0], packed[1]] = packed[2]


class Slots:
    """The tables, and which slots are free."""

    def __init__(self, num_slots: int, max_model_len: int, max_pages: int, device: torch.device) -> None:
        self.num_slots, self.device = num_slots, device
        self.tokens = Table(num_slots, max_model_len + 1, device)  # committed tokens; the newest may lie at the limit
        self.pages = Table(num_slots, max_pages, device)
        self._counts = Table(num_slots, 2, device)  # committed length, prompt length
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def lengths(self) -> Tensor:
        return self._counts.device[:, 0]  # [S]

    @property
    def prompt_lengths(self) -> Tensor:
        return self._counts.device[:, 1]  # [S]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def length(self, slot: int) -> int:
        return int(self._counts.host[slot, 0])

    def prompt_length(self, slot: int) -> int:
        return int(self._counts.host[slot, 1])

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        if slot in self._free:
            raise AssertionError(f"slot {slot} was given back twice")
        self._free.append(slot)

    def begin(self, slot: int, tokens: list[int], prompt_length: int) -> None:
        """Fill a freshly taken slot with a sequence's committed tokens."""
        self.tokens.write(slot, 0, tokens)
        self._counts.write(slot, 0, (len(tokens), prompt_length))

    def append(self, slot: int, tokens: list[int]) -> None:
        length = self.length(slot)
        self.tokens.write(slot, length, tokens)
        self._counts.write(slot, 0, (length + len(tokens),))

    def flush(self) -> None:
        for table in (self.tokens, self.pages, self._counts):
            table.flush()
