"""Which row of a batch is its sequence's newest token: what the host counts is what the tables say."""

from __future__ import annotations

import torch

from paceline.cache.slots import Slots
from paceline.drafters.cached import StateReader
from paceline.models.batch import Nodes, Work, pack


def test_the_newest_rows_that_the_host_counts_are_those_of_the_tables() -> None:
    table = Slots(3, 64, 4, torch.device("cpu"))
    for slot, length in enumerate((9, 20, 5)):
        table.begin(slot, list(range(length)), length)
    nodes = Nodes(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 0]), None)
    newest = []
    for work, drafted in (
        ([Work(1, 17, 3)], None),
        ([Work(2, 4, 1), Work(0, 2, 7)], None),
        ([Work(0, 2, 4), Work(1, 19, 1)], None),  # a prompt's chunk, which ends before its newest token
        ([Work(0, 6, 1, 2), Work(1, 19, 1)], nodes),  # what lies behind it may be a node
    ):
        batch = pack(work, table, 16, drafted)
        slots = batch.layout.slots
        wanted = torch.where(batch.positions == table.lengths[slots] - 1, slots, table.null)
        assert torch.equal(StateReader.newest_slots(batch, table), wanted)
        newest.append((wanted != table.null).sum().item())
    assert newest == [1, 2, 1, 2]
