"""The contract for drafters of one's own: the page's drafter keeps it, and each way to break it is found."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, EarlyExit, testing
from paceline.cli.drafters import parse
from paceline.drafters import make, table
from paceline.drafters.base import Context, Drafter, Observation, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.testing import check_drafter, tiny_llm, tiny_model
from tests.native import needs_native

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_drafter.py"
SHOWN = runpy.run_path(str(EXAMPLE))
Remembering: Any = SHOWN["Remembering"]


def test_the_page_s_drafter_keeps_the_contract_as_the_page_s_test_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(testing, "check_drafter", lambda factory: seen.append(check_drafter(factory)) or seen[0])
    SHOWN["test_it_changes_no_token"]()
    [checked] = seen
    assert checked.runs == 7 * 2 + 3 * 4 + 3
    assert checked.accepted > 50 and checked.proposed > checked.accepted


@needs_native
def test_a_drafter_on_the_device_keeps_it_on_the_native_kernels() -> None:
    assert check_drafter(lambda: EarlyExit(3, layers=2), kernels="native").accepted > 300


class Guessing(QuietDrafter):
    """Proposes the newest token again, and is wrong about something."""

    name = "guessing"
    max_nodes = 2

    def __init__(self, fault: str) -> None:
        self.fault, self.on_device = fault, fault == "reads"

    def propose(self, context: Context) -> Proposal:
        newest = context.table.tokens.tensor[context.slots, context.lengths - 1]
        if self.fault == "reads" and int(newest[0]) < 0:
            raise AssertionError
        if self.fault == "writes":
            context.table.tokens.tensor[context.slots, context.lengths - 1] = (newest + 1) % 97
        return Proposal.of_chains(torch.stack([newest] * 2, 1), context.budgets.clamp(max=2), self.name)


def test_a_drafter_that_reads_and_says_it_does_not_is_found() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        check_drafter(lambda: Guessing("reads"))


def test_a_drafter_that_changes_what_is_permanent_is_found() -> None:
    with pytest.raises(AssertionError, match="fresh, batch of 1, greedy: plain decoding says"):
        check_drafter(lambda: Guessing("writes"))


def test_an_object_is_a_drafter_and_every_engine_has_a_copy_of_it() -> None:
    mine = Remembering(3)
    one, other = tiny_llm(mine), tiny_llm(mine)
    assert isinstance(one.engine.drafter, Drafter)
    assert len({id(drafter) for drafter in (mine, one.engine.drafter, other.engine.drafter)}) == 3
    one.generate([[5, 6, 7, 5, 6]], temperature=0, max_tokens=8)
    assert one.engine.drafter.next and not mine.next and not other.engine.drafter.next  # type: ignore[attr-defined]


@pytest.mark.parametrize("missing", ["name", "max_nodes", "propose"])
def test_a_drafter_that_lacks_what_every_one_has_is_refused_in_a_sentence(missing: str) -> None:
    has = {"name": "mine", "max_nodes": 2, "propose": Guessing.propose}
    mine = type("Mine", (QuietDrafter,), {name: value for name, value in has.items() if name != missing})
    with pytest.raises(OptionError, match=f"Mine has no {missing}; a drafter has name, max_nodes and propose"):
        tiny_llm(mine())


# Found by a word


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package's entry points."""
    points = {
        "mine": f"{__name__}:Guessing",
        "exit2": "paceline.drafters.early_exit:EarlyExit",
        "ngram": f"{__name__}:Guessing",
        "gone": "no_such_module:Thing",
    }

    def entry_points(group: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint(name, value, group) for name, value in points.items() if group == table.GROUP]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    table.installed.cache_clear()
    yield
    table.installed.cache_clear()


@pytest.mark.usefixtures("package")
def test_an_entry_point_is_a_word() -> None:
    assert make("exit2", num_draft_tokens=2) == EarlyExit(2)
    assert parse("exit2:layers=1") == EarlyExit(layers=1)
    llm = LLM(tiny_model(), "exit2", kernels="reference", max_model_len=64, device="cpu")
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "early_exit"
    with pytest.raises(OptionError, match=r"early_exit.*, mine, exit2, gone, or a model's name or path"):
        make(5)
    with pytest.raises(OptionError, match="did you mean 'exit2'"):
        make("exit22")
    with pytest.raises(OptionError, match="--drafter 'mine:num_draft_tokens=6': mine takes no options"):
        parse("mine:num_draft_tokens=6")  # a class; options are the fields of a dataclass


@pytest.mark.usefixtures("package")
def test_a_word_that_is_taken_stays_what_it_is_and_one_that_cannot_be_imported_is_refused() -> None:
    assert type(make("ngram")).__name__ == "NGram"
    with pytest.raises(OptionError, match="drafter 'gone' cannot be loaded from no_such_module:Thing: No module named"):
        make("gone")


def test_observations_reach_a_drafter_of_ones_own() -> None:
    class Counting(Guessing):
        def observe(self, seen: Observation) -> None:
            self.rows = getattr(self, "rows", 0) + int(seen.kept.sum())

    llm = tiny_llm(Counting(""))
    llm.generate([[5, 6, 7, 5, 6]], temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.engine.drafter.rows == 5 + 8 - 1  # type: ignore[union-attr]
