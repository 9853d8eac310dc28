"""What a cache costs before it is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.kernels.ops import LayerSpec, Part


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
def test_the_first_rows_of_every_head_cost_their_own_pages_and_no_huge_ones() -> None:
    cache = KVCache(PagePool(1024, 16), torch.device("cpu"))
    before = resident()
    part = Part(8, 64, torch.float32)  # 4 MB a head
    layers = cache.add_layers([LayerSpec((part, part))] * 4)
    for keys, values in layers:
        assert keys[-1].count_nonzero() == 0 and keys.data_ptr() % 64 == 0
        keys[:4], values[:4] = 1.0, 2.0
    assert resident() - before < 8 * 2**20  # 64 heads: 128 MB in huge pages
