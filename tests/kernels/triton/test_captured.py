"""Replayed rounds draft what launched ones do: on the reference kernels and on Triton's, where every address counts.

The contract wants the text alone, and a drafter that reads the wrong rows changes no text.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.engine.budget import FixedBudget
from paceline.engine.device import DeviceRunner
from paceline.engine.replaying import ReplayingRunner
from paceline.engine.round import Round
from paceline.testing import SETTINGS, prompts, tiny_llm
from tests.drafters.contract import DRAFTERS
from tests.kernels.triton.leaving import go_through_all

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a fake device on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]


def drafts(monkeypatch: pytest.MonkeyPatch, name: str, kernels: str, captured: bool) -> list[list[int]]:
    """What was proposed, round by round."""
    seen: list[list[int]] = []
    runner, way = (ReplayingRunner, "_replay") if captured else (DeviceRunner, "_launch")
    run = getattr(runner, way)

    def noting(*given: object) -> Round:
        round: Round = run(*given)
        if round.proposal.num_nodes:
            seen.append(round.proposal.tokens[0, : int(round.proposal.sizes[0])].tolist())
        return round

    with monkeypatch.context() as patch:
        patch.setattr(runner, way, noting)
        llm = tiny_llm(DRAFTERS[name]({}), kernels=kernels, behind=1, captured=captured, budget="fixed", max_num_seqs=2)
        llm.engine.budget = FixedBudget(2)
        if kernels == "triton":  # what that leaves behind is seen by nobody
            go_through_all(monkeypatch, llm)
        llm.generate([prompts(1)[0][:6]], dataclasses.replace(SETTINGS["greedy"], max_tokens=4))
    return seen


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_replayed_rounds_draft_what_launched_ones_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("triton")
    wanted = drafts(monkeypatch, name, "reference", captured=False)
    assert len(wanted) >= 2
    assert drafts(monkeypatch, name, "reference", captured=True) == wanted
    assert drafts(monkeypatch, name, "triton", captured=True) == wanted
