"""Nothing in a round reads data on the host: rounds are launched on a device that has none.

On the `meta` device tensors have shapes and no values: any read (`.item()`, `.tolist()`, `nonzero`, a selecting mask,
a truth value, a copy to the host) raises. Here an engine that reads nothing for many rounds launches them all: propose,
pack, forward, process, verify, commit and observe, as a captured round would run them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline import LLM
from paceline.drafters.base import Context, Drafter, Observation, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.prompts import Prompt
from paceline.sampling.rules import RULES
from tests.drafters.contract import DRAFTERS, SETTINGS
from tests.fakes import Known, tiny_model

ROUNDS = 7


def on_nothing(drafter: Any, acceptance: str = "exact") -> LLM:
    """An LLM on the device without data, which never waits for a round."""
    llm = LLM(tiny_model(), device="meta", kernels="torch", max_model_len=64, acceptance=acceptance, max_num_seqs=4)
    llm.engine.depth = 10 * ROUNDS
    llm.set_drafter(drafter)
    return llm


def launch(llm: LLM, setting: str, rounds: int = ROUNDS) -> None:
    for length in (5, 19):
        llm.add(Prompt(None, list(range(3, 3 + length))), SETTINGS[setting])
    for _ in range(rounds):
        assert llm.step() == [], "nothing can have been read"


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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["none", *REAL])
def test_a_round_reads_nothing(name: str, setting: str) -> None:
    llm = on_nothing(None if name == "none" else DRAFTERS[name]({}))
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
        return Proposal.empty(len(context.slot_list), context.table.device)


@pytest.mark.parametrize("where", ["observe", "propose"])
def test_a_drafter_that_reads_is_caught(where: str) -> None:
    llm = on_nothing(Peeking(where))
    with pytest.raises((RuntimeError, NotImplementedError)):
        launch(llm, "greedy")
