"""Rows put by slot and taken again in Triton are those of tensor operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.testing import tiny_llm, tokens_of
from tests.drafters.contract import DRAFTERS

SLOTS, NOBODY = 5, 5


@pytest.mark.parametrize(("tables", "width"), [(1, 40), (2, 1500), (3, 40)])
def test_rows_are_put_and_taken_as_by_tensor_operations(tables: int, width: int, device: torch.device) -> None:
    from paceline.kernels.triton.keeping import pick, put, take

    generator = torch.Generator().manual_seed(tables)
    rows = [torch.randn(4, 2 * width, generator=generator).to(device)[:, width:] for _ in range(tables)]
    kept = [torch.randn(SLOTS + 1, width, generator=generator).half().to(device) for _ in range(tables)]
    wanted, known = [table.clone() for table in kept], torch.zeros(SLOTS + 1, dtype=torch.bool, device=device)
    places = torch.tensor([3, NOBODY, 0, NOBODY], device=device)
    put(places, rows, kept, known, NOBODY)
    for made, table in zip(rows, wanted):
        table[places[[0, 2]]] = made[[0, 2]].half()
    assert all(torch.equal(*pair) for pair in zip(kept, wanted))
    assert known.tolist() == [True, False, False, True, False, False]

    slots, budgets = torch.tensor([0, 4, NOBODY, 3], device=device), torch.tensor([2, 3, 4, 5], device=device)
    most, found = take(slots, budgets, known, kept)
    assert most.tolist() == [2, 0, 0, 5] and most.dtype == budgets.dtype
    assert all(torch.equal(one, table[slots]) for one, table in zip(found, kept)) and len(found) == tables
    assert all(torch.equal(pick(table, slots), table[slots]) for table in kept)


@pytest.mark.parametrize("apart", [False, True])
def test_rows_move_in_all_layers_as_by_tensor_operations(apart: bool, device: torch.device) -> None:
    """Layers alike lie evenly apart, or anywhere; a row may go where another was that goes on."""
    from paceline.kernels.triton.ops import TritonOps

    generator, shapes = torch.Generator().manual_seed(3), [(3, 20)] * 4 + [(1, 40)] * 2
    whole = [torch.randn(4, 3, 64, 20, generator=generator).half().to(device) for _ in range(2)]
    layers = [tuple(part[number].transpose(0, 1) for part in whole) for number in range(4)]
    layers += [(torch.randn(64, *shape, generator=generator).to(device),) for shape in shapes[4:]]
    if apart:
        layers = [tuple(part.clone(memory_format=torch.preserve_format) for part in layer) for layer in layers]
        layers[0], layers[2] = layers[2], layers[0]
    wanted = [tuple(part.clone() for part in layer) for layer in layers]
    source = torch.tensor([[5, 8, 9], [0, 0, 0], [30, 33, 0]], device=device)
    target = torch.tensor([[4, 5, 8], [0, 0, 0], [31, 32, 0]], device=device)
    for layer in wanted:
        for part in layer:
            part[target] = part[source]
    TritonOps(device).keep(layers, source.t().contiguous().t(), target)
    assert all(torch.equal(*pair) for one, other in zip(layers, wanted) for pair in zip(one, other))
    TritonOps(device).keep(layers, source[:, :0], target[:, :0])
    TritonOps(device).keep(layers, target[2, :1], source[2, :1])
    assert all(torch.equal(part[30], part[31]) for layer in layers for part in layer)


@pytest.mark.parametrize("kind", ["runs of two and one", "values narrower", "other strides", "other dtypes"])
def test_parts_that_are_not_alike_move_on_their_own(kind: str, device: torch.device) -> None:
    from paceline.kernels.triton.keeping import move

    whole = torch.randn(4, 10, 2, 16, generator=torch.Generator().manual_seed(4)).to(device)
    layers: list[tuple[torch.Tensor, ...]] = {
        "runs of two and one": [(whole[0],), (whole[1],), (whole[3],)],
        "values narrower": [(whole[0], whole[1, :, :, :8].contiguous())],
        "other strides": [(whole[0], whole[1].transpose(0, 1).contiguous().transpose(0, 1))],
        "other dtypes": [(whole[0], whole[1].half())],
    }[kind]
    wanted = [tuple(part.clone() for part in layer) for layer in layers]
    source, target = torch.tensor([[5, 7]], device=device), torch.tensor([[3, 4]], device=device)
    for layer in wanted:
        for part in layer:
            part[target] = part[source]
    move(layers, source, target)
    assert all(torch.equal(*pair) for one, other in zip(layers, wanted) for pair in zip(one, other))


def test_no_rows_are_put_nowhere(device: torch.device) -> None:
    from paceline.kernels.triton.keeping import put

    kept, known = torch.zeros(2, 8, device=device), torch.zeros(2, dtype=torch.bool, device=device)
    put(torch.zeros(0, dtype=torch.int64, device=device), (kept[:0],), (kept,), known, 1)
    assert not kept.any() and not known.any()


@pytest.mark.parametrize("name, kept", [("eagle3", ("_states", "_finals")), ("medusa", ("_states",))])
def test_rounds_keep_what_tensor_operations_keep(name: str, kept: tuple[str, ...], device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    if device.type != "cpu":
        pytest.skip("the tiny model is on the CPU")
    found = []
    for rounds in (None, TritonRounds()):
        llm = tiny_llm(DRAFTERS[name]({}), behind=1, block_size=8)
        llm.engine.table.rounds = rounds
        tokens_of(llm, 2, "greedy", max_tokens=4)
        drafter: Any = llm.engine.runner.drafter
        pages = torch.arange(1, llm.engine.cache.pool.num_pages + 1)
        found.append([*llm.engine.cache.read_tails(pages), *(getattr(drafter, table)[:-1] for table in kept)])
    assert all(torch.equal(*pair) for pair in zip(*found))
    assert int(found[0][1].sum()) >= 2 and bool(found[0][2].any())
