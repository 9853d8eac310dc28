"""Verdicts in Triton: what was accepted, committed and sent is what tensor operations say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.tree import PADDING, Proposal
from paceline.kernels.ops import Layout, cache_rows
from paceline.kernels.rounds import Trees
from paceline.sampling.verify import Judged, walk

BATCH, SLOTS = 12, 14
nothing: Any = None


def drawn(seed: int, nodes: int, chain: bool, scratch: bool) -> tuple[Proposal, Tensor, Tensor]:
    """A proposal of every size there is, of few tokens; the target's choices, and whose they are."""
    draws = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draws)

    tokens, sizes = numbers(0, 2, BATCH, nodes), numbers(0, nodes + 1, BATCH)
    sizes[::2] = nodes
    place = torch.arange(nodes)
    parents = (place - 1).expand(BATCH, nodes)
    if not chain:
        parents = torch.stack([numbers(-1, node, BATCH) for node in range(nodes)], dim=1)
    parents = torch.where(place < sizes[:, None], parents, PADDING)
    unfit = numbers(0, 8, BATCH, nodes) == 0 if scratch else None
    origins = numbers(0, 2, BATCH, nodes) if scratch else None
    proposal = Proposal(tokens, parents, sizes, chain, None, unfit, ("a", "b"), origins)
    rows = BATCH * (nodes + 1)
    index = torch.randperm(rows, generator=draws).view(BATCH, nodes + 1)
    choices = numbers(0, 2, rows)
    choices[numbers(0, 9, rows) == 0] = -1
    return proposal, choices, index


def filled() -> Slots:
    """Slots of different lengths, some near their limits, one at its own."""
    table = Slots(SLOTS, 40, 4, torch.device("cpu"))
    for slot in range(SLOTS):
        table.begin(slot, list(range(10 + slot)), 4, limit=10 + 2 * slot)
    table.pages.tensor[:-1] = torch.arange(SLOTS)[:, None] * 4 + torch.arange(4) + 1
    return table


def trees(proposal: Proposal, device: torch.device) -> Trees:
    """Its tensors as the kernels take them, tokens and sizes being parts of a wider table."""
    sent = torch.cat([proposal.tokens, proposal.sizes[:, None]], dim=1).to(device)
    others = [None if part is None else part.to(device) for part in (proposal.scratch, proposal.origins)]
    return Trees(sent[:, :-1], proposal.parents.to(device), sent[:, -1], proposal.chain, *others)


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize(("nodes", "chain"), [(0, True), (1, True), (5, True), (1, False), (12, False), (16, False)])
def test_a_walk_commits_and_sends_what_tensor_operations_do(
    nodes: int, chain: bool, scratch: bool, device: torch.device
) -> None:
    from paceline.kernels.triton import walking

    proposal, choices, index = drawn(nodes, nodes, chain, scratch)
    verdict = walk(Judged(proposal, nothing, nothing, index, nothing), choices[index])
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(nodes))[:BATCH]
    slots[3] = SLOTS  # padding
    table = filled()
    tables = table.tables._replace(
        tokens=table.tokens.tensor.clone().to(device), **counts(table._counts.tensor.clone().to(device))
    )
    out = walking.walk(choices.to(device), index.to(device), trees(proposal, device), slots.to(device), tables)
    shape = [] if chain else [proposal.parents, proposal.scratch]
    parts = [verdict.table(), proposal.sizes[:, None], *shape, proposal.origins]
    assert out.cpu().equal(torch.cat([part.long() for part in parts if part is not None], dim=1))
    assert nodes < 5 or len(set(verdict.lengths.tolist())) > 2, "short and long ones"
    table.commit(slots, verdict.tokens, verdict.lengths + 1)
    assert tables.lengths.cpu().equal(table.lengths)
    assert tables.tokens[:-1].cpu().equal(table.tokens.tensor[:-1])


def counts(tensor: Tensor) -> dict[str, Tensor]:
    """The columns of a table of lengths, prompts and limits."""
    return {"lengths": tensor[:, 0], "limits": tensor[:, 2]}


def test_a_walk_without_slots_commits_nothing(device: torch.device) -> None:
    from paceline.kernels.triton import walking

    proposal, choices, index = drawn(3, 4, True, False)
    table = filled()
    before = table._counts.tensor.clone(), table.tokens.tensor.clone()
    tables = table.tables
    if device.type == "cuda":
        tables = tables._replace(**{name: getattr(tables, name).to(device) for name in ("tokens", "lengths", "limits")})
    walking.walk(choices.to(device), index.to(device), trees(proposal, device), None, tables)
    assert table._counts.tensor.equal(before[0]) and table.tokens.tensor.equal(before[1])
    assert tables.tokens.cpu().equal(before[1])


def test_accepted_nodes_move_to_where_their_depth_is(device: torch.device) -> None:
    from paceline.kernels.triton import walking

    table, block = filled(), 8
    slots = torch.tensor([3, SLOTS, 0, 5])
    positions = torch.tensor([12, 0, 9, 14])
    nodes = torch.tensor([[0, 3, 4], [1, -1, -1], [2, 9, -1], [-1, -1, -1]])
    roots = torch.tensor([0, 1, 2, 3])
    layout = Layout(slots, positions, nothing, None, None, nothing, nothing, table.pages.tensor, block, [])
    depth = torch.arange(3)
    moved = (nodes >= 0) & (nodes != depth)
    owners = torch.where(moved, slots[:, None], table.null)
    lines = [torch.where(moved, positions[:, None] + 1 + place, 0) for place in (nodes, depth)]
    expected = torch.stack([cache_rows(layout, owners, line) for line in lines])
    there = replace(
        layout, slots=slots.to(device), positions=positions.to(device), page_table=layout.page_table.to(device)
    )
    assert walking.moves(nodes.to(device), roots.to(device), there).cpu().equal(expected)
    assert (expected[0] != expected[1]).sum() == 5


@pytest.mark.parametrize("most", [0, 4096])
def test_choices_may_come_as_keys(most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import picking, walking

    monkeypatch.setattr(picking, "BLOCK", 32)
    monkeypatch.setattr(walking, "MOST_KEYS", most)
    proposal, _, index = drawn(5, 1, True, False)
    logits = torch.randn(index.numel(), 40, generator=torch.Generator().manual_seed(1))
    logits[:, :2] += 3
    logits[::9] = float("nan")
    choices, keys = picking.best(logits.to(device)), picking.best_keys(logits.to(device))
    assert keys.shape == (len(logits), 2) and -1 in choices.tolist()
    tables = filled().tables
    if device.type == "cuda":
        tables = tables._replace(**{name: getattr(tables, name).to(device) for name in ("tokens", "lengths", "limits")})
    given = index.to(device), trees(proposal, device), None, tables
    one, other = walking.walk(choices, *given), walking.walk(keys, *given)
    assert one.equal(other) and set(one[:, 3].tolist()) == {0, 1}
