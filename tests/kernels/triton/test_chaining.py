"""Chains and trees drawn without leaving the device are those that are drawn step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import Eagle
from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.kernels.chain import Chain, Feeding, Link
from paceline.kernels.ops import Weight
from paceline.kernels.reference import ReferenceOps
from paceline.testing import tiny_llm, tokens_of
from tests.drafters.contract import DRAFTERS
from tests.drafters.tiny_eagle import tiny_eagle


def proposed(
    config: Any, setting: str, rooms: tuple[int, ...] = ()
) -> list[tuple[list[list[int]], list[list[int]], list[int]]]:
    """All that a drafter proposes in a run that is a round behind: tokens, parents, sizes. Rooms: how many nodes the
    sequences may have, in turn."""
    from paceline.kernels.triton.rounds import TritonRounds

    llm = tiny_llm(config, behind=1)
    llm.engine.table.rounds = TritonRounds()
    found = []
    drafter: Any = llm.engine.runner.drafter
    plain = drafter.propose

    def propose(context: Context) -> Proposal:
        if rooms:
            given = [rooms[(len(found) + row) % len(rooms)] for row in range(len(context.slot_list))]
            context.budgets = torch.minimum(context.budgets, torch.tensor(given))
        proposal: Proposal = plain(context)
        place = torch.arange(proposal.num_nodes)
        inside = place < proposal.sizes[:, None]
        drafts, parents = (torch.where(inside, part, -2) for part in (proposal.tokens, proposal.parents))
        found.append((drafts.tolist(), parents.tolist(), proposal.sizes.tolist()))
        return proposal

    drafter.propose = propose
    tokens_of(llm, 2, setting, max_tokens=len(rooms) or 4)
    return found


@pytest.mark.parametrize(
    ("name", "setting"), [("draft_is_target", "seeded"), ("eagle3_short", "seeded"), ("hydra", "greedy")]
)
def test_a_chain_is_the_one_that_is_drawn_step_by_step(
    name: str, setting: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import chaining

    if device.type != "cpu":
        pytest.skip("the tiny models are on the CPU")
    expected = proposed(DRAFTERS[name]({}), setting)
    drawn = []

    def draw(ops: Any, chain: Any, caches: Any) -> Any:
        drawn.append(chaining.draw(ops, chain, caches))
        return drawn[-1]

    monkeypatch.setattr(ReferenceOps, "chains", True)
    monkeypatch.setattr(ReferenceOps, "chain", draw)
    assert proposed(DRAFTERS[name]({}), setting) == expected
    assert len(drawn) == len(expected) and any(any(sizes) for *_, sizes in expected)


@pytest.mark.parametrize(
    ("head", "setting", "rooms", "shape"),
    [
        ("first", "greedy", (25, 7, 0, 12, 3), "static"),
        ("third", "seeded", (25, 6, 1), "static"),
        ("third", "greedy", (4, 2, 3), "static"),
        ("third", "seeded", (31, 9, 2), "wide"),
        ("third", "seeded", (15, 6, 1), "dynamic"),
        ("first", "greedy", (13, 7, 0, 2, 9), "dynamic"),
    ],
)
def test_a_tree_is_the_one_that_is_drawn_level_by_level(
    head: str, setting: str, rooms: tuple[int, ...], shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and where there is room for a part of it: then what has no room is fed to nobody."""
    from paceline.kernels.triton import branching, growing

    if device.type != "cpu":
        pytest.skip("the tiny models are on the CPU")
    config = Eagle(tiny_eagle(head), max(rooms), tree=shape, **({"top_k": 5, "depth": 2} if shape == "dynamic" else {}))
    expected = proposed(config, setting, rooms)
    drawn: list[Any] = []
    fed: list[bool] = []

    def draw(ops: Any, sprout: Any, form: Any, caches: Any) -> Any:
        feeding, plain, lines = sprout.feeding, ops.run, []

        def run(network: Any, inputs: Any, *rest: Any) -> Any:
            somebodys = (inputs.layout.slots != len(feeding.page_table) - 1).view(len(feeding.most), -1)
            lines.append(torch.arange(somebodys.shape[1]) + sum(map(len, lines)))
            assert torch.equal(somebodys, lines[-1] < feeding.most[:, None] - 1)
            fed.extend(somebodys.flatten().tolist())
            return plain(network, inputs, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "run", run)
            drawn.append((growing if shape == "dynamic" else branching).draw(ops, sprout, form, caches))
        return drawn[-1]

    monkeypatch.setattr(ReferenceOps, "trees", True)
    monkeypatch.setattr(ReferenceOps, "tree", draw)
    assert proposed(config, setting, rooms) == expected
    assert len(drawn) == len(expected) and {size for *_, sizes in expected for size in sizes} == set(rooms)
    assert {True, False} == set(fed)


def test_a_tree_whose_nodes_have_very_many_children_is_drawn_level_by_level(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("the tiny models are on the CPU")
    asked = list[int]()

    def draw(ops: Any, sprout: Any, form: Any, caches: Any) -> Any:
        asked.append(form.children)
        raise RuntimeError("at once")

    monkeypatch.setattr(ReferenceOps, "trees", True)
    monkeypatch.setattr(ReferenceOps, "tree", draw)
    found = proposed(Eagle(tiny_eagle("third"), 20, tree="dynamic", top_k=17, depth=1), "seeded")
    assert not asked and any(any(sizes) for *_, sizes in found)
    with pytest.raises(RuntimeError, match="at once"):
        proposed(Eagle(tiny_eagle("third"), 20, tree="dynamic", top_k=16, depth=1), "seeded")
    assert asked == [16]


def test_a_head_that_finds_the_best_on_the_way_draws_the_same(device: torch.device) -> None:
    from paceline.kernels.triton import chaining
    from paceline.kernels.triton.ops import TritonOps

    ops, rows = TritonOps(device), torch.arange(5, device=device)
    head = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)).to(device)
    head[:, 0], head[150] = -head[:, 0].abs(), head[7]  # equals
    finals = torch.stack([head[7], -head[199], head[40], head[0], head[0]])
    finals[3], finals[4, 2] = torch.tensor([float("inf")] + [0.0] * 15), float("nan")  # nothing above -inf, no number
    ids = torch.arange(200, device=device).flip(0).contiguous()
    pages = torch.arange(12, device=device).view(6, 2)
    feeding = Feeding(rows, rows + 3, torch.tensor([3, 0, 1, 2, 1], device=device), None, pages, 8)
    chain = Chain([Link(None, Weight(head, (200, 16)))] * 2, feeding, finals=finals, ids=ids)
    expected, found = chaining.draw(ops, chain, ()), ops.chain(chain, ())
    assert found.tokens.equal(expected.tokens) and found.counts.tolist() == expected.counts.tolist() == [2, 0, 1, 2, 1]
    assert found.tokens[0].tolist() == [192, 192] and found.tokens[3:].tolist() == [[199, 199]] * 2
