"""A drafter on the host keeps rounds from being ahead only while it drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from paceline import LLM, FirstOf, Medusa, Suffix
from paceline.drafters.base import Context, Observation, QuietDrafter, Taps
from paceline.drafters.tree import Proposal
from paceline.engine.budget import MeasuredBudget
from paceline.engine.round import Plan, Round, Times
from paceline.engine.stats import SequenceStats
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.drafters.tiny_medusa import knowing_medusa
from tests.engine.asking import Scripted
from tests.fakes import VOCAB, Recorded, tiny_llm

SUFFIX = Suffix(tree=True, max_spec_factor=4.0, min_token_prob=0.01)
HOST: dict[str, Callable[[Recorded], Any]] = {
    "suffix": lambda known: SUFFIX,
    "first_of": DRAFTERS["first_of"],
    "first_of_states": lambda known: FirstOf(Suffix(8, max_tree_depth=5), Medusa(knowing_medusa(known))),
}


@dataclasses.dataclass
class Watched:
    """Of every round, in the order of launches: nodes planned for all, and how many rounds were in flight."""

    drafted: list[int] = dataclasses.field(default_factory=list)
    ahead: list[int] = dataclasses.field(default_factory=list)


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Watched:
    engine, watched, run = llm.engine, Watched(), llm.engine.runner.run

    def note(plan: Plan, times: Times) -> Round:
        watched.drafted.append(sum(work.num_nodes for work in plan.work))
        watched.ahead.append(len(engine._in_flight))
        return run(plan, times)

    monkeypatch.setattr(engine.runner, "run", note)
    return watched


def said(llm: LLM, **changes: Any) -> tuple[list[list[int]], list[SequenceStats]]:
    outputs = llm.generate(prompts(3), dataclasses.replace(SETTINGS["greedy"], **changes))
    found = [output.outputs[0] for output in outputs]
    return [output.token_ids for output in found], [output.stats for output in found]


@pytest.mark.parametrize("name", HOST)
def test_rounds_without_drafts_are_ahead_of_a_drafter_on_the_host_and_change_none_of_its_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same budgets in the same rounds: tables shared, and on a device that is no round behind, one and two,
    launched and replayed."""
    drafts: list[list[tuple[list[int], list[int]]]] = []
    for behind, captured in ((None, False), (0, False), (1, False), (1, True), (2, False)):
        llm = tiny_llm(HOST[name](recorded(3, "greedy")), behind, captured=captured, block_size=4)
        watched = watch(llm, monkeypatch)
        drafts.append([])
        for _ in range(2):  # what was said once is expected the second time
            llm.engine.budget = Scripted(0, 0, 0, 4, 4, 0, 2)
            texts, stats = said(llm)
            assert texts == plain(3, "greedy")
            drafts[-1] += [(one.proposed, one.accepted) for one in stats]
        assert all(not ahead for nodes, ahead in zip(watched.drafted, watched.ahead) if nodes)
        assert max(watched.ahead) == (behind or 0)
        assert sum(map(bool, watched.drafted)) >= 3
    assert all(found == drafts[0] for found in drafts) and any(sum(accepted) for _, accepted in drafts[0])


@pytest.mark.parametrize("changes, budget", [({}, (0,)), ({"max_draft_tokens": 0}, (4,))])
def test_with_nothing_to_draft_a_drafter_on_the_host_is_as_far_behind_as_nobody(
    changes: dict[str, int], budget: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is 0, or every request's own limit is."""
    rounds = []
    for drafter in (None, SUFFIX):
        llm = tiny_llm(drafter, behind=1, captured=True)
        llm.engine.budget, watched = Scripted(*budget), watch(llm, monkeypatch)
        assert said(llm, **changes)[0] == plain(3, "greedy")
        rounds.append(watched)
    assert rounds[0] == rounds[1] and sum(rounds[0].ahead) == len(rounds[0].ahead) - 1


class Looking(QuietDrafter):
    """On the host, and looks at a round's rows when it is told of it: nothing may be ahead of that."""

    name = "looking"
    max_nodes = 2
    taps = Taps(hidden=(1,))

    def create(self) -> Looking:
        return self

    def observe(self, seen: Observation) -> None:
        assert seen.states is not None and len(seen.states) == len(seen.batch.ids)
        for slot, place, token in zip(*(part.tolist() for part in (seen.slots, seen.positions, seen.following))):
            if slot != seen.table.null:
                assert token == seen.table.tokens.host[slot, place + 1], "the row of another round"

    def propose(self, context: Context) -> Proposal:
        wrong = [[1, VOCAB - 1][:budget] for budget in context.budget_list]
        return Proposal.of_texts(wrong, context.table.device, self.name)


@pytest.mark.parametrize("captured", [False, True])
def test_a_drafter_that_looks_at_a_rounds_rows_on_the_host_has_nothing_ahead_of_it(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(Looking(), behind=2, captured=captured)
    llm.engine.budget, watched = Scripted(0, 0, 2), watch(llm, monkeypatch)
    assert said(llm)[0] == plain(3, "greedy")
    assert max(watched.ahead) == 0 and any(watched.drafted)


def test_a_measured_budget_knows_which_rounds_overlap() -> None:
    llm = tiny_llm(None, behind=1)
    llm.engine.budget_kind = "measured"
    for drafter, ahead in ((SUFFIX, 0), (DRAFTERS["ngram"]({}), 5), (Looking(), -1)):
        llm.set_drafter(drafter)
        assert isinstance(llm.engine.budget, MeasuredBudget) and llm.engine.budget.ahead == ahead
