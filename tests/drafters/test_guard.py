"""Nothing in a round reads data on the host: rounds are launched on a device that has none.

On the `meta` device tensors have shapes and no values: any read (`.item()`, `.tolist()`, `nonzero`, a selecting mask,
a truth value, a copy to the host) raises. Here an engine that reads nothing for many rounds launches them all: propose,
pack, forward, process, verify, commit and observe, as a captured round would run them. Nothing is sent there either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM
from paceline.drafters.base import Context, Drafter, Observation, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.sampling.rules import RULES
from paceline.testing import ROUNDS, check_reads_nothing, closed_lists, launch, on_nothing, set_apart
from tests.capturing import NothingIsMade, NothingIsSent, Pretended, Refused
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


@pytest.mark.parametrize("name", ["none", *REAL])
def test_a_round_reads_nothing_and_no_drafter_loops_over_sequences(name: str) -> None:
    llm = on_nothing(None if name == "none" else DRAFTERS[name]({}))
    with closed_lists():
        launch(llm, "everything")
    assert len(llm.engine._in_flight) == ROUNDS
    rows = [len(round.batch.ids) for round in llm.engine._in_flight]
    assert rows[0] == 24 and (rows[-1] > 2) == (name != "none"), "the last rounds carry drafts"


def capturing(drafter: Any) -> tuple[LLM, Pretended]:
    capture = Pretended()
    llm = set_apart(on_nothing(None), 1000, capture)
    llm.set_drafter(drafter)
    return llm, capture


STAGED = ("none", "medusa_tree")  # what the stages do is the same for all


@pytest.mark.parametrize(
    "name, setting", [*((name, "greedy") for name in ("none", *REAL)), *((name, "everything") for name in STAGED)]
)
def test_a_captured_round_neither_reads_nor_is_sent_anything(name: str, setting: str) -> None:
    llm, capture = capturing(None if name == "none" else DRAFTERS[name]({}))
    with closed_lists():
        launch(llm, setting)
    assert capture.count >= 2, "prompts, and a round with drafts"
    assert len(llm.engine._in_flight) == ROUNDS
    assert (llm.engine._in_flight[-1].proposal.num_nodes > 0) == (name != "none")


@pytest.mark.parametrize("name", REAL)
def test_a_sequence_is_forgotten_without_waiting_for_rounds_in_flight(name: str) -> None:
    """What is sent from memory that is not pinned waits for them."""
    llm, _ = capturing(DRAFTERS[name]({}))
    launch(llm, "greedy")
    assert llm.engine.drafter is not None
    with torch.inference_mode(), NothingIsMade(), NothingIsSent():
        llm.engine.drafter.forget([0, 1])


class Sending(QuietDrafter):
    """Sends something, and says it does not."""

    name = "sending"
    max_nodes = 2
    on_device = True

    def __init__(self, how: Callable[[Tensor], object]) -> None:
        self.how = how

    def create(self) -> Sending:
        return self

    def propose(self, context: Context) -> Proposal:
        self.how(context.lengths)
        return Proposal.empty(len(context.slot_list), context.table.device)


SENDINGS: dict[str, Callable[[Tensor], object]] = {
    "a list": lambda lengths: torch.tensor([1, 2], device=lengths.device),
    "a list beside": lambda lengths: lengths.new_tensor([1, 2]),
    "a tensor of the host": lambda lengths: torch.zeros(2).to(lengths.device),
    "a number": lambda lengths: lengths.__setitem__(0, 1),
    "places": lambda lengths: lengths[[0]],
    "places of the host": lambda lengths: lengths[torch.arange(1)],
    "values at a mask": lambda lengths: lengths.index_put_((lengths > 0,), lengths + 1),
}


@pytest.mark.parametrize("what", SENDINGS)
def test_a_drafter_that_sends_is_caught(what: str) -> None:
    llm, _ = capturing(Sending(SENDINGS[what]))
    with pytest.raises(Refused):
        launch(llm, "greedy")


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
