"""Replayed rounds draft what launched ones do: on the reference kernels and on Triton's, where every address counts.

The contract wants the text alone, and a drafter that reads the wrong rows changes no text.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch

from paceline import Eagle
from paceline.engine.budget import FixedBudget
from paceline.engine.device import DeviceRunner
from paceline.engine.replaying import ReplayingRunner
from paceline.engine.round import Round
from paceline.testing import SETTINGS, prompts, tiny_llm
from tests.drafters.contract import DRAFTERS
from tests.drafters.tiny_eagle import tiny_eagle
from tests.kernels.triton.launches import Launches
from tests.kernels.triton.leaving import go_through_all

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a fake device on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]


TREES = {
    "tree": lambda: Eagle(tiny_eagle("third"), 5, tree="static"),
    "grown": lambda: Eagle(tiny_eagle("third"), 5, tree="dynamic", top_k=3, depth=2),
}


class Ran(NamedTuple):
    """What rounds did, one by one."""

    drafts: list[list[int]]
    proposed: list[list[str]]  # launches
    settled: list[list[str]]


@functools.cache
def ran(name: str, kernels: str, captured: bool) -> Ran:
    found = Ran([], [], [])
    kind, way = (ReplayingRunner, "_replay") if captured else (DeviceRunner, "_launch")
    run = getattr(kind, way)

    def noting(*given: object) -> Round:
        round: Round = run(*given)
        if round.proposal.num_nodes:
            found.drafts.append(round.proposal.tokens[0, : int(round.proposal.sizes[0])].tolist())
        return round

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, way, noting)
        drafter = TREES[name]() if name in TREES else DRAFTERS[name]({})
        llm = tiny_llm(drafter, kernels=kernels, behind=1, captured=captured, budget="fixed", max_num_seqs=2)
        llm.engine.budget = FixedBudget(5 if name in TREES else 2)
        runner: Any = llm.engine.runner
        if kernels == "triton":
            go_through_all(patch, llm)  # what that leaves behind is seen by nobody
            launches = Launches(patch)
            patch.setattr(runner.drafter, "propose", launches.noted(runner.drafter.propose, found.proposed))
            patch.setattr(runner, "_settle_frame", launches.noted(runner._settle_frame, found.settled))
        llm.generate([prompts(1)[0][:6]], dataclasses.replace(SETTINGS["greedy"], max_tokens=4))
    return found


@pytest.mark.parametrize("name", ["eagle3", *TREES, "draft_model"])
def test_replayed_rounds_draft_what_launched_ones_do(name: str) -> None:
    pytest.importorskip("triton")
    wanted = ran(name, "reference", captured=False).drafts
    assert len(wanted) >= 2
    assert ran(name, "reference", captured=True).drafts == wanted
    assert ran(name, "triton", captured=True).drafts == wanted


def test_a_draft_takes_nine_launches_and_reading_pairs_twelve() -> None:
    """Each costs a microsecond or two, whatever it does; of PyTorch's own there is none."""
    pytest.importorskip("triton")
    found = ran("eagle3", "triton", captured=True)
    pick, begin = ["product", "_link_kernel"], ["_budget_kernel", "_take_kernel"]  # the head, and who notes its pick
    layer = ["_join", "product", "store_heads", "look", "product", "product", "product"]
    assert found.proposed[-1] == [*begin, *pick, *layer, *pick]
    # Of a tree a launch more finds several in place of the best; its levels are as many as a chain has drafts.
    found, pick = ran("tree", "triton", captured=True), ["product", "_best_kernel", "_branch_kernel"]
    assert found.proposed[-1] == [*begin, *pick, *layer, *pick, *layer, *pick]
    # One that grows says on the way who is the likeliest, and takes the likeliest of all in one more.
    grown, pick = ran("grown", "triton", captured=True), ["product", "_best_kernel", "_grow_kernel"]
    assert grown.proposed[-1] == [*begin, *pick, *layer, *pick, *layer, *pick, "_keep_kernel"]
    # What was kept; the target's states through one product; the layer; what is kept by slot and by page.
    settled = ["_observe_kernel", "product", *layer, "_rms_norm", "_put_kernel", "_put_kernel"]
    assert ran("eagle3", "triton", captured=True).settled[-1] == settled
    assert found.settled[-1] == ["_moves_kernel", "_move_kernel", *settled], "in all layers at once, keys and values"
