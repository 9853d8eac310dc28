"""Rows that see one another: with an end of its own a row sees what stands behind it, on every set of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.batch import Work
from tests.kernels.tiny import Table, load, make, tokens
from tests.native import EXACT

TEXT, BLOCK = 21, 6


def by_transformers(name: str, ids: list[int], first: int) -> Tensor:
    """The last states of a block behind a text; its rows see all of it and the text from `first` on."""
    count = len(ids)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    seen[TEXT:] = True
    seen[TEXT:, :first] = False
    mask = torch.zeros(count, count).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        found: Tensor = make(name).model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0, TEXT:]
    return found


@pytest.mark.parametrize("kernels", ["torch", *EXACT])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("first", [0, 3])
def test_the_rows_of_a_block_see_one_another_and_the_text(name: str, kernels: str, first: int) -> None:
    table, blocks = Table(load(name, kernels)), [tokens(TEXT + BLOCK, seed) for seed in (1, 2)]
    model, layers = table.loaded.model, table.cache.layers
    for slot, ids in enumerate(blocks):
        table.begin(slot, ids)
        table.run([Work(slot, 0, TEXT)])
    batch = table.pack([Work(slot, TEXT, BLOCK) for slot in range(2)])
    batch.layout.until = torch.full((2 * BLOCK,), TEXT + BLOCK)
    batch.layout.first = torch.full((2 * BLOCK,), first)
    found = model.forward(batch, layers).final.view(2, BLOCK, -1)
    for ids, states in zip(blocks, found):
        assert (states - by_transformers(name, ids, first)).abs().max() <= 1e-4
    alone = table.pack([Work(1, TEXT, BLOCK)])
    alone.layout.until, alone.layout.first = batch.layout.until[BLOCK:], batch.layout.first[BLOCK:]
    again = model.forward(alone, layers).final
    assert torch.equal(again, found[1]) or (kernels == "torch" and (again - found[1]).abs().max() <= 1e-5)
    causal = table.run([Work(0, TEXT, BLOCK)]).final
    assert (causal[0] - found[0, 0]).abs().max() > 0.01
