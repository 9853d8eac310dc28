"""The vocabulary head at the end of a forward: logits of chosen rows, and the best token of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.kernels.cpu.library import library
from paceline.models.batch import Work, pack
from paceline.sampling.verify import argmax
from tests.kernels.tiny import ALL, BLOCK_SIZE, Table, load, paths_built, same_bits, tokens


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_a_forward_ends_with_the_logits_that_were_asked_for(name: str, kernels: str) -> None:
    loaded = load(name, kernels)
    table = Table(loaded)
    table.begin(0, tokens(40, 1))
    table.begin(1, tokens(9, 2))
    batch = pack([Work(0, 0, 40), Work(1, 0, 9)], table.slots, BLOCK_SIZE)
    for rows in ([39, 48], [3, 2, 2, 0, 7, 8, 9, 10, 48, 40, 1], []):
        chosen = torch.tensor(rows, dtype=torch.int64)
        hidden = loaded.model.forward(batch, table.cache.layers, rows=chosen)
        assert hidden.logits is not None
        assert same_bits(hidden.logits, loaded.model.logits(hidden.final[chosen]))
        if kernels == "native":
            assert hidden.best is not None
            assert hidden.best.tolist() == argmax(hidden.logits).tolist()
            assert not rows or not same_bits(hidden.logits[0], hidden.logits[1])
    assert loaded.model.forward(batch, table.cache.layers).logits is None


@pytest.mark.parametrize("path", paths_built())
def test_the_best_is_argmax_s_ties_and_oddities_included(path: str) -> None:
    found = library()
    assert found is not None
    before = found.paceline_path()
    found.paceline_select(path.encode())
    rng = np.random.default_rng(2)
    try:
        for count in (1, 5, 15, 16, 17, 97, 1000):
            for trial in range(40):
                row = rng.integers(-3, 4, count).astype(np.float32)  # many ties
                row[rng.random(count) < (0.3 if trial % 2 else 0.0)] = -np.inf
                if trial % 10 == 3:
                    row[rng.integers(count)] = np.nan
                if trial % 10 == 5:
                    row[:] = -np.inf
                wanted = int(argmax(torch.from_numpy(row)[None])[0])
                assert found.paceline_largest(row.ctypes.data, count) == wanted, (count, trial)
    finally:
        found.paceline_select(before)
