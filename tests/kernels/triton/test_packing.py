"""Batches packed in Triton, and what is observed of them, are those of tensor operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.base import Observation
from paceline.drafters.tree import PADDING, paths
from paceline.models.batch import Batch, Nodes, Shape, Static, pack_rows, places_of
from paceline.sampling.verify import Verdict

NUM_SLOTS, LONGEST, BLOCK = 6, 40, 8
SLOTS = torch.tensor([4, 0, NUM_SLOTS, 2, 5])
STARTS = torch.tensor([30, 5, 0, 11, 39])
DRAWS = torch.Generator()
PARTS = ("kept", "slots", "positions", "following", "newest", "tails")


def filled(device: torch.device) -> Slots:
    """Slots of different lengths; the tokens behind them are there too, so that reading beyond shows."""
    table = Slots(NUM_SLOTS, LONGEST, 14, device, apart=True)
    for slot in range(NUM_SLOTS):
        table.begin(slot, list(range(100 * slot, 100 * slot + 38)), 4)
        table._counts.write(slot, 0, (6 + 6 * slot,))
    for slot in range(NUM_SLOTS):
        table.pages.write(slot, 0, [slot * 14 + page + 1 for page in range(14)])
    table.flush()
    return table


def drafted(nodes: int, tree: bool) -> Nodes:
    """For the first three sequences; one has none, one has all."""
    DRAWS.manual_seed(nodes)
    tokens = torch.randint(-1, 50, (3, nodes), generator=DRAWS)
    sizes = torch.tensor([nodes, 0, nodes // 2])
    if not tree:
        return Nodes(tokens, sizes, None)
    parents = torch.stack([torch.randint(-1, node, (3,), generator=DRAWS) for node in range(nodes)], dim=1)
    return Nodes(tokens, sizes, paths(torch.where(torch.arange(nodes) < sizes[:, None], parents, PADDING), nodes - 1))


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return value._replace(**{k: moved(v, device) for k, v in value._asdict().items()}) if value is not None else None


CASES: dict[str, tuple[Shape, Static]] = {
    "committed alone": (((1, 0), (3, 0), (1, 0), (7, 0), (1, 0)), Static([60] * 5)),
    "the newest": (((1, 0),) * 5, Static([60] * 5, newest=True)),
    "chains": (((1, 4), (1, 4), (2, 4), (6, 0), (1, 0)), Static([60] * 5, drafted(4, False))),
    "trees": (((1, 7), (1, 7), (1, 7), (9, 0), (1, 0)), Static([60] * 5, drafted(7, True), newest=True)),
    "ends": (
        ((4, 2), (4, 2), (4, 2), (4, 0), (4, 0)),
        Static([60] * 5, drafted(2, False), torch.tensor([32, 9, 2, 90, 40])),
    ),
    "a stretch": (
        ((5, 0),) * 5,
        Static([60] * 5, None, STARTS + 3, torch.tensor([0, 3, 5, 1, 2]), STARTS + torch.tensor([1, 0, 2, 9, 1])),
    ),
    "levels": (
        ((0, 5), (0, 5), (0, 5)),
        Static([60] * 3, drafted(5, True), torch.tensor([38, 9, 3]), torch.tensor([0, 3, 5]), skipped=3),
    ),
}


def packed(name: str, table: Slots, starts: Tensor | None) -> Batch:
    shape, given = CASES[name]
    batch = len(shape)
    own = replace(
        given, **{key: moved(getattr(given, key), table.device) for key in ("nodes", "ends", "first", "since")}
    )
    places = places_of(shape, min(batch, 3), 0 if given.nodes is None else given.nodes.tokens.shape[1], table.device)
    begin = None if starts is None else starts[:batch].to(table.device)
    return pack_rows(places, SLOTS[:batch].to(table.device), begin, table, BLOCK, own)


def assert_equal(one: Batch, other: Batch) -> None:
    for name in ("slots", "positions", "tree_base", "path", "first", "lines", "write"):
        expected, found = getattr(one.layout, name), getattr(other.layout, name)
        assert (expected is None) == (found is None), name
        assert expected is None or (expected.dtype == found.dtype and expected.equal(found)), name
    assert one.ids.equal(other.ids)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_packed_as_by_tensor_operations(name: str, device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    table = filled(device)
    starts = torch.where(torch.arange(5) % 2 == 0, STARTS, -1) if CASES[name][1].newest else STARTS
    expected = packed(name, table, starts), packed(name, table, None)
    table.rounds = TritonRounds()
    assert_equal(expected[0], packed(name, table, starts))
    assert_equal(expected[1], packed(name, table, None))


@pytest.mark.parametrize("name", ["the newest", "chains", "trees"])
def test_what_was_kept_is_what_tensor_operations_say(name: str, device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    table = filled(device)
    batch = packed(name, table, STARTS - 3)
    nodes = torch.tensor([[0, 2, 3], [-1, -1, -1], [1, -1, -1]], device=device)
    verdict = Verdict(nodes, nodes, nodes)
    for judged in (verdict, None):
        table.rounds = None
        expected = [getattr(Observation(table, batch, judged, []), part) for part in PARTS]
        table.rounds = TritonRounds()
        seen = Observation(table, batch, judged, [])
        for part, tensor in zip(PARTS, expected):
            assert getattr(seen, part).dtype == tensor.dtype and getattr(seen, part).equal(tensor), part
        assert 0 < int(seen.kept.sum()) < len(batch.ids)


def test_what_pairs_see_is_found_with_what_was_kept(device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    table = filled(device)
    batch = packed("chains", table, STARTS - 3)
    table.rounds = TritonRounds()
    for first in (torch.arange(NUM_SLOTS + 1), torch.arange(NUM_SLOTS + 1).flip(0) * 6):
        first = first.to(device)
        alone, after = Observation(table, batch, None, []), Observation(table, batch, None, [])
        assert after.tails is not None  # somebody has asked before
        for seen in (alone, after, alone):
            rows = seen.pair_rows(first)
            assert rows is not None and rows.layout.first is not None
            assert rows.layout.first.equal(torch.minimum(first[seen.slots], rows.layout.positions))
            first = first - 1  # another drafter's
    assert bool((rows.layout.first < rows.layout.positions).any())
