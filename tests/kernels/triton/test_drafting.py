"""Lookups and budgets in Triton are those of tensor operations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.cache.slots import Slots
from paceline.drafters.ngram import NGram
from paceline.drafters.tree import PADDING, Proposal
from paceline.engine.context import DraftContext
from paceline.params import SamplingParams
from paceline.sampling.rules import find_rule
from paceline.sampling.state import SamplerState, Words

LONGEST, SLOTS = 60, [3, 0, 5, 2, 4, 1]
LENGTHS = (1, 2, 9, 40, 58, 33)
WORDS = Words([], [])


def filled(device: torch.device, seed: int) -> SamplerState:
    """Texts of few tokens, so that much repeats; behind their ends stands what others left."""
    draws = random.Random(seed)
    table = Slots(len(SLOTS), LONGEST, 1, device, apart=True)
    state = SamplerState(table, 9, device)
    for slot, length in enumerate(LENGTHS):
        table.tokens.write(slot, 0, [draws.randrange(3) for _ in range(LONGEST)])
        text, prompt = [draws.randrange(3) for _ in range(length)], max(1, length - draws.randrange(12))
        table.begin(slot, text, prompt, limit=min(length + 5, LONGEST))
        state.set(slot, SamplingParams(temperature=0), WORDS, 0, 0)
    table.flush()
    return state


def context(state: SamplerState, asked: list[int]) -> DraftContext:
    return DraftContext(SLOTS, asked, state, find_rule("exact"))


@pytest.mark.parametrize(
    "config", [NGram(5), NGram(3, 1, 6), NGram(4, rule="transformers"), NGram(4, rule="reference")]
)
def test_a_lookup_proposes_what_tensor_operations_do(
    config: NGram, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import drafting
    from paceline.kernels.triton.rounds import TritonRounds

    monkeypatch.setattr(drafting, "BLOCK", 16)  # so that texts are searched in several parts
    states = filled(device, 1), filled(device, 1)
    states[1].table.rounds = TritonRounds()
    drafters = [config.create(), config.create()]
    found = 0
    for step in range(3):  # by the reference rule the last round decides how many
        one, other = (drafter.propose(context(state, [4, 2, 5, 5, 5, 5])) for drafter, state in zip(drafters, states))
        assert_equal(one, other)
        found += int(one.sizes.sum())
        for state in states:
            slots = torch.tensor(SLOTS, device=device)
            said = torch.cat([one.tokens, one.tokens[:, :1]], dim=1)
            state.table.commit(slots, said, (one.sizes + 1 if step else one.sizes // 2 + 1))
    assert found


def assert_equal(one: Proposal, other: Proposal) -> None:
    assert one.chain == other.chain and one.names == other.names
    for name in ("tokens", "parents", "sizes"):
        assert getattr(one, name).equal(getattr(other, name)), name


@pytest.mark.parametrize("asked", [[4] * 6, [4, 0, 9, 1, 2, 3]])
def test_budgets_and_what_they_cut_are_those_of_tensor_operations(asked: list[int], device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    state = filled(device, 2)
    wide: Any = torch.arange(6 * 9, device=device).view(6, 9)[:, :7]
    trees = Proposal(wide, wide % 5 - 1, torch.tensor([7, 3, 7, 0, 5, 6], device=device), chain=False)
    for spread in (0, 64):
        state.table.spread, state.table.rounds = spread, None
        expected = context(state, asked)
        budgets, lengths, cut = expected.budgets, expected.lengths, expected.cut(trees)
        state.table.rounds = TritonRounds()
        found = context(state, asked)
        assert found.budgets.equal(budgets) and found.lengths.equal(lengths)
        assert_equal(context(state, asked).cut(trees), cut)
    assert len(set(budgets.tolist())) == len(set(asked))


@pytest.mark.parametrize("nodes", [1, 11])
def test_paths_are_those_of_tensor_operations(nodes: int, device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    draws = torch.Generator().manual_seed(nodes)
    parents = torch.stack([torch.randint(-1, node, (3,), generator=draws) for node in range(nodes)], dim=1)
    parents = torch.where(torch.arange(nodes) < torch.tensor([nodes, nodes // 2, 0])[:, None], parents, PADDING)
    trees = Proposal(parents, parents, parents[:, 0], chain=False).paths()
    assert trees is not None
    deepest = int((trees >= 0).sum(2).max())
    for most in (None, deepest):
        one = Proposal(parents.to(device), parents.to(device), parents[:, 0], chain=False, max_depth=most)
        expected, found = one.paths(), one.paths(TritonRounds())
        assert expected is not None and found is not None and found.equal(expected)


def test_drafts_that_came_true_are_counted_as_by_tensor_operations(device: torch.device) -> None:
    from paceline.drafters.chain import ChainReader
    from paceline.kernels.triton.rounds import TritonRounds

    state = filled(device, 3)
    table, tokens, depth = state.table, state.table.tokens.tensor, 5
    read = torch.tensor([0, 1, 3, 38, 50, 20, 0], device=device)
    fed = torch.stack([tokens[slot, at : at + depth] for slot, at in enumerate(read.tolist())])
    fed[4, 3] += 1  # said otherwise
    num_fed = torch.tensor([5, 5, 2, 5, 5, 0, 0], device=device)
    found = []
    for rounds in (None, TritonRounds()):
        table.rounds = rounds
        drafter: Any = object.__new__(ChainReader)
        drafter.depth, drafter.read, drafter._fed, drafter._num_fed = depth, read.clone(), fed, num_fed.clone()
        drafter._count_true(context(state, [4] * 6))
        found.append((drafter.read.tolist(), drafter._num_fed.tolist()))
    assert found[0] == found[1] and found[0][0] == [0, 1, 5, 39, 53, 20, 0]
