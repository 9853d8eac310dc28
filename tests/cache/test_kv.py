"""What a cache costs before it is full."""

from __future__ import annotations

import os
from itertools import pairwise
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


@pytest.mark.parametrize("apart", [False, True])
def test_layers_that_are_alike_lie_evenly_apart_whatever_they_see(apart: bool) -> None:
    """Where those with a window are under pages of their own, each kind for itself."""
    cache, windowed = KVCache(PagePool(4, 16), torch.device("cpu")), PagePool(2, 16)
    specs = [LayerSpec.kv(2, 8, torch.float16, window) for window in (4, None, 4, 4, None, 4)]
    cache.add_target(specs, windowed if apart else None)
    pools = [windowed if apart and spec.window else cache.pool for spec in specs]
    assert [layer[0].shape for layer in cache.layers] == [(pool.num_rows, 2, 8) for pool in pools]
    numbers = [(1, 4), (0, 2, 3, 5)] if apart else [range(6)]
    for alike in numbers:
        for parts in zip(*(cache.layers[number] for number in alike)):
            places = [part.data_ptr() for part in parts]
            assert {after - place for place, after in pairwise(places)} == {parts[0].numel() * 2}
    assert cache.groups == ([[cache.layers[number] for number in alike] for alike in numbers] if apart else [])
