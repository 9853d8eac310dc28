"""Chains drawn without leaving the device are those that are drawn step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.kernels.reference import ReferenceOps
from paceline.testing import tiny_llm, tokens_of
from tests.drafters.contract import DRAFTERS


def proposed(name: str, setting: str) -> list[tuple[list[list[int]], list[int]]]:
    """All that a drafter proposes in a run that is a round behind."""
    from paceline.kernels.triton.rounds import TritonRounds

    llm = tiny_llm(DRAFTERS[name]({}), behind=1)
    llm.engine.table.rounds = TritonRounds()
    found = []
    drafter: Any = llm.engine.runner.drafter
    plain = drafter.propose

    def propose(context: Context) -> Proposal:
        proposal: Proposal = plain(context)
        place = torch.arange(proposal.num_nodes)
        drafts = torch.where(place < proposal.sizes[:, None], proposal.tokens, -1)
        found.append((drafts.tolist(), proposal.sizes.tolist()))
        return proposal

    drafter.propose = propose
    tokens_of(llm, 2, setting, max_tokens=4)
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
    expected = proposed(name, setting)
    drawn = []

    def draw(ops: Any, chain: Any, caches: Any) -> Any:
        drawn.append(chaining.draw(ops, chain, caches))
        return drawn[-1]

    monkeypatch.setattr(ReferenceOps, "chains", True)
    monkeypatch.setattr(ReferenceOps, "chain", draw)
    assert proposed(name, setting) == expected
    assert len(drawn) == len(expected) and any(any(sizes) for _, sizes in expected)
