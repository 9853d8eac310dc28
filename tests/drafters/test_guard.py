"""Nothing in a round reads data on the host: rounds are launched on a device that has none.

On the `meta` device tensors have shapes and no values: any read (`.item()`, `.tolist()`, `nonzero`, a selecting mask,
a truth value, a copy to the host) raises. Here an engine that reads nothing for many rounds launches them all: propose,
pack, forward, process, verify, commit and observe, as a captured round would run them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.drafters.base import Context, Drafter, Observation, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.sampling.rules import RULES
from paceline.testing import ROUNDS, check_reads_nothing, closed_lists, launch, on_nothing
from tests.drafters.contract import DRAFTERS
from tests.fakes import Known


def made(name: str) -> Drafter | None:
    config = DRAFTERS[name]({})
    drafter: Drafter = config.create()
    return drafter if drafter.on_device and not isinstance(drafter, Known) else None


REAL = [name for name in DRAFTERS if made(name) is not None]


def test_the_guard_looks_at_every_drafter_that_says_it_is_on_the_device(
    record_property: Callable[[str, object], None],
) -> None:
    assert {"ngram", "ngram_reference", "draft_model", "first_on_device"} <= set(REAL)
    functions = "propose, pack, forward, process, verify, commit, observe"
    record_property("shown", f"no read by the host in {functions}: none, {', '.join(REAL)}")


# What a greedy round does otherwise it does for a chain and for a tree alike, whoever drafts.
GUARDED = [(name, "everything") for name in ("none", *REAL)]
GUARDED += [(name, "greedy") for name in ("none", "draft_model", "eagle_dynamic")]


@pytest.mark.parametrize("name, setting", GUARDED)
def test_a_round_reads_nothing_and_no_drafter_loops_over_sequences(name: str, setting: str) -> None:
    llm = on_nothing(None if name == "none" else DRAFTERS[name]({}))
    with closed_lists():
        launch(llm, setting)
    assert len(llm.engine._in_flight) == ROUNDS
    rows = [len(round.batch.ids) for round in llm.engine._in_flight]
    assert rows[0] == 24 and (rows[-1] > 2) == (name != "none"), "the last rounds carry drafts"


@pytest.mark.parametrize("acceptance", RULES)
def test_no_rule_reads_anything(acceptance: str) -> None:
    launch(on_nothing(DRAFTERS["draft_model"]({}), acceptance), "everything")


class Peeking(QuietDrafter):
    """Looks at a length, and says it does not."""

    name = "peeking"
    max_nodes = 2
    on_device = True

    def __init__(self, where: str) -> None:
        self.where = where

    def create(self) -> Peeking:
        return self

    def observe(self, seen: Observation) -> None:
        if self.where == "observe":
            seen.kept.nonzero()

    def propose(self, context: Context) -> Proposal:
        if self.where == "propose":
            int(context.lengths[0])
        if self.where == "loop":
            sum(slot for slot in context.slot_list)
        return Proposal.empty(len(context.slot_list), context.table.device)


@pytest.mark.parametrize("where", ["observe", "propose"])
def test_a_drafter_that_reads_is_caught(where: str) -> None:
    llm = on_nothing(Peeking(where))
    with pytest.raises((RuntimeError, NotImplementedError)):
        launch(llm, "greedy")


def test_a_drafter_that_loops_is_caught() -> None:
    with pytest.raises(AssertionError, match="looped over sequences"):
        check_reads_nothing(lambda: Peeking("loop"))
