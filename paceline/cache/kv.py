"""Keys and values by layer, under pages. Drafters add layers of their own under the target's pages.

Layers of the target that look back only so far may have pages of their own (`cache/windowed.py`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from paceline.cache.pages import PagePool
from paceline.kernels.ops import TOGETHER, LayerCache, LayerSpec
from paceline.kernels.rounds import Rounds


class KVCache:
    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self.pool, self.device = pool, device
        self.layers: list[LayerCache] = []  # the target's
        self.groups: list[list[LayerCache]] = []  # the same by whose pages they are under: all positions', a window's
        self.tails: Tensor | None = None  # [pages+1, H·taps]: the tapped states of each full page's last position
        self._epoch = 0

    def add_target(self, specs: Sequence[LayerSpec], windowed: PagePool | None) -> None:
        """Storage for the target's layers; windowed: whose pages those with a window are under, if not the others'."""
        if windowed is None:
            self.layers = self.add_layers(specs)
            return
        self.groups = [
            self._add([spec for spec in specs if (spec.window is None) == whole], pool)
            for whole, pool in ((True, self.pool), (False, windowed))
        ]
        seeing_all, seeing_few = map(iter, self.groups)
        self.layers = [next(seeing_all if spec.window is None else seeing_few) for spec in specs]

    def add_layers(self, specs: Sequence[LayerSpec]) -> list[LayerCache]:
        """Storage for more layers."""
        return self._add(specs, self.pool)

    def _add(self, specs: Sequence[LayerSpec], pool: PagePool) -> list[LayerCache]:
        """Zeros, because masked rows are multiplied by 0, and 0 · NaN is NaN."""
        rows = -(-pool.num_rows // TOGETHER) * TOGETHER
        layers: list[LayerCache] = []
        for parts, alike in groupby(spec.parts for spec in specs):
            count = len(list(alike))
            # A head's rows lie side by side, since attention reads one head at all positions; neighbours that are alike
            # lie evenly apart, so that one kernel finds them all.
            made = (self._zeros((count, part.heads, rows, part.width), part.dtype) for part in parts)
            layers += zip(*(part.transpose(1, 2).unbind() for part in made))
        return layers

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.frombuffer(_fresh_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)

    def new_epoch(self) -> int:
        """A number for a drafter that starts now: rows written under another number are not its own."""
        self._epoch += 1
        return self._epoch

    def keep_tails(self, width: int, dtype: torch.dtype) -> None:
        """Make room for `width` tapped values a page; nothing is known yet."""
        self.tails = torch.zeros((self.pool.num_pages + 1, width), dtype=dtype, device=self.device)
        self._known = torch.zeros(self.pool.num_pages + 1, dtype=torch.bool, device=self.device)

    def forget_tails(self) -> None:
        """Nothing is known any more; the room stays."""
        if self.tails is not None:
            self._known.zero_()

    def read_tails(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H·taps] for B pages, and whether each was ever kept; page 0's never is."""
        assert self.tails is not None
        return self.tails[pages], self._known[pages]

    def write_tails(self, pages: Tensor, states: Tensor, rounds: Rounds | None = None) -> None:
        """states [T, H·taps] for pages [T]; page 0: not to be kept."""
        assert self.tails is not None
        if rounds is not None:
            rounds.put(pages, (states,), (self.tails,), self._known, 0)
            return
        self.tails[pages] = states.to(self.tails.dtype)
        self._known[pages] = pages > 0


def _fresh_pages(size: int) -> Any:
    """Zeros that cost no memory until they are written to; torch's are written at once.

    Not in huge pages, which numpy would ask for: every head of every layer would clear one for its first row.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return bytearray(size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages
