"""Keys and values by layer, under one page table. Drafters add layers of their own under the same pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.cache.pages import PagePool
from paceline.kernels.ops import TOGETHER, LayerCache


class KVCache:
    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self.pool, self.device = pool, device
        self.layers: list[LayerCache] = []  # the target's
        self.tails: Tensor | None = None  # [pages, H·taps]: the tapped states of each full page's last position
        self._epoch = 0

    def add_layers(self, count: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[LayerCache]:
        """Storage for `count` more layers. Zeros, because masked rows are multiplied by 0, and 0 · NaN is NaN."""
        rows = -(-self.pool.num_pages * self.pool.block_size // TOGETHER) * TOGETHER
        shape = (num_kv_heads, rows, head_dim)
        # A head's rows lie side by side, since attention reads one head at all positions.
        return [
            (self._zeros(shape, dtype).transpose(0, 1), self._zeros(shape, dtype).transpose(0, 1)) for _ in range(count)
        ]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # numpy's zeros cost no memory until they are written to; torch's are written at once. Vectors of 64 bytes are
        # loaded from them, in one access where they begin at a multiple of that.
        size = int(np.prod(shape)) * dtype.itemsize
        memory = np.zeros(size + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)

    def new_epoch(self) -> int:
        """A number for a drafter that starts now: rows written under another number are not its own."""
        self._epoch += 1
        return self._epoch

    def keep_tails(self, width: int, dtype: torch.dtype) -> None:
        """Make room for `width` tapped values a page."""
        self.tails = torch.zeros((self.pool.num_pages, width), dtype=dtype, device=self.device)

    def read_tails(self, pages: list[int]) -> Tensor:
        """[B, H·taps] for B pages; zeros for -1."""
        assert self.tails is not None
        index = torch.tensor(pages, dtype=torch.int64).to(self.device)
        return torch.where((index >= 0)[:, None], self.tails[index.clamp(min=0)], 0)

    def write_tails(self, pages: list[int], rows: list[int], states: Tensor) -> None:
        if pages and self.tails is not None:
            index = torch.tensor([pages, rows], dtype=torch.int64).to(self.device)
            self.tails[index[0]] = states[index[1]].to(self.tails.dtype)
