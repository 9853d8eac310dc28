"""Something fails, or somebody presses Ctrl-C, anywhere in a step: nothing leaks, nobody is lost, no token changes."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import paceline
from paceline import LLM, SamplingParams
from paceline.drafters.base import Context, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.errors import EngineError
from paceline.outputs import CompletionOutput, Gathered
from paceline.prompts import Prompt
from paceline.sampling.state import SamplerState
from paceline.testing import MAX_TOKENS
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.engine.interrupting import Interrupt
from tests.fakes import check_books, tiny_llm, tiny_model
from tests.tokens import NUM_IDS, tokenizer

PACKAGE = str(Path(paceline.__file__).parent)
WATCHED = ("engine", "cache", "drafters")  # folders whose lines an interrupt may hit

# Recovery itself; `step`'s own lines (tracing stops between the end of its `with` and what that does); and `take` with
# its list, which hands updates over: what happens between that and the caller's next line is the caller's.
UNTOUCHED = (
    "_recover",
    "take_back",
    "reset",
    "restart",
    "step",
    "take",
    "__enter__",
    "__exit__",
    "_let_go",
    "note_told",
)


STRUCK = [  # each drafter at lines of its own
    (40 + 73 * number, name, behind)
    for number, (name, behind) in enumerate(
        itertools.product(("none", "suffix_tree", "draft_model", "replay_tree"), (None, 2))
    )
]


def interrupt_at(line: int) -> Interrupt:
    """Counted in the watched folders, recovery apart."""

    def watched(frame: FrameType) -> bool:
        code = frame.f_code
        inside = any(code.co_filename.startswith(f"{PACKAGE}/{folder}/") for folder in WATCHED)
        return inside and code.co_name not in UNTOUCHED

    return Interrupt(line, watched)


def finish(llm: LLM, gathered: dict[str, Gathered]) -> dict[str, CompletionOutput]:
    done: dict[str, CompletionOutput] = {}
    while llm.engine.has_work:
        for update in llm.step():
            output = gathered[update.request_id].add(update)
            if output is not None:
                done[update.request_id] = output
        check_books(llm)
    return done


@pytest.mark.parametrize("first, name, behind", STRUCK)
def test_an_interrupt_at_any_line_loses_nothing(first: int, name: str, behind: int | None) -> None:
    """Interrupted once, at a line that differs from try to try, an engine that goes on says what it would have said."""
    drafter = None if name == "none" else DRAFTERS[name](recorded(3, "seeded"))
    llm = tiny_llm(drafter, behind, block_size=4, max_batched_tokens=20, max_num_seqs=4)
    hits = 0
    for line in range(first, 7000, 587):
        gathered: dict[str, Gathered] = {}
        for prompt in prompts(3):
            gathered[llm.add(Prompt(None, prompt), SETTINGS["seeded"])] = Gathered()
        done: dict[str, CompletionOutput] = {}
        interrupt = interrupt_at(line)
        try:
            with interrupt:
                while llm.engine.has_work:
                    llm.engine.step()
                    for update in llm.engine.take():
                        output = gathered[update.request_id].add(update)
                        if output is not None:
                            done[update.request_id] = output
        except KeyboardInterrupt:
            hits += 1
        check_books(llm)
        done |= finish(llm, gathered)
        assert [done[request].token_ids for request in gathered] == plain(3, "seeded"), f"interrupted at line {line}"
        assert all(len(output.provenance) == output.stats.tokens == MAX_TOKENS for output in done.values())
        assert llm.engine.table.num_free == llm.options.max_num_seqs
        llm._live.clear()
        if not interrupt.fired:
            break  # all lines of the answers were before it
    assert hits >= 5, "interrupts must hit something"


@pytest.mark.parametrize("behind", [None, 1])
def test_who_waits_for_the_end_alone_loses_nothing_by_an_interrupt_either(behind: int | None) -> None:
    """No update is made on the way: what an answer has is what was committed."""
    llm = tiny_llm(DRAFTERS["replay_tree"](recorded(3, "seeded")), behind, block_size=4, max_num_seqs=4)
    for line in range(90, 4000, 411):
        asked = llm._ask(prompts(3), SETTINGS["seeded"], {})
        for one in asked:
            llm._queue(one.samples)
        with contextlib.suppress(KeyboardInterrupt), interrupt_at(line):
            while llm.engine.has_work:
                llm.engine.step()
                assert all(update.finished for update in llm.engine.take())
        check_books(llm)
        while llm.engine.has_work:
            llm.engine.step()
            assert all(update.finished for update in llm.engine.take())
        outputs = [one.output().outputs[0] for one in asked]
        assert [output.token_ids for output in outputs] == plain(3, "seeded"), f"interrupted at line {line}"
        assert all(len(output.provenance) == output.stats.tokens == MAX_TOKENS for output in outputs)
        llm._live.clear()


@pytest.mark.parametrize("behind", [None, 2])
def test_an_interrupt_while_a_request_is_aborted_or_the_drafter_changed_loses_nobody(behind: int | None) -> None:
    llm = tiny_llm(DRAFTERS["ngram"]({}), behind, block_size=4, max_num_seqs=4)
    for line in range(1 + 33 * (behind or 0), 1200, 67):  # odd and even in turn
        gathered = {llm.add(prompt, SETTINGS["greedy"]): Gathered() for prompt in prompts(3)}
        first, second, third = gathered
        done: dict[str, CompletionOutput] = {}
        for _ in range(3):
            for update in llm.step():
                gathered[update.request_id].add(update)
        with contextlib.suppress(KeyboardInterrupt), interrupt_at(line):
            llm.abort(second) if line % 2 else llm.set_drafter(DRAFTERS["draft_model"]({}))
        check_books(llm)
        llm.abort(second)
        done |= finish(llm, gathered)
        assert [done[name].token_ids for name in (first, third)] == [plain(3, "greedy")[0], plain(3, "greedy")[2]]
        assert done[second].finish_reason == "abort" or (line % 2 == 1 and done[second].finish_reason == "length")
        assert llm.engine.table.num_free == llm.options.max_num_seqs
        llm.set_drafter(DRAFTERS["ngram"]({}))


def test_the_text_that_was_streamed_is_whole_after_an_interrupt() -> None:
    llm = LLM(tiny_model(vocab=NUM_IDS), tokenizer=tokenizer(), kernels="reference", max_model_len=64, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=["never said by anybody"])
    (wanted,) = llm.generate([[5, 9, 22]], params)
    for line in range(5, 1500, 71):
        gathered = {llm.add([5, 9, 22], params): Gathered()}
        done: dict[str, CompletionOutput] = {}
        with contextlib.suppress(KeyboardInterrupt), interrupt_at(line):
            while llm.engine.has_work:
                for update in llm.step():
                    output = gathered[update.request_id].add(update)
                    if output is not None:
                        done[update.request_id] = output
        (output,) = (done | finish(llm, gathered)).values()
        assert output.text == wanted.outputs[0].text and output.token_ids == wanted.outputs[0].token_ids


def test_an_interrupted_call_leaves_nothing_behind_and_the_next_is_served() -> None:
    llm = tiny_llm(DRAFTERS["draft_model"]({}), block_size=4)
    for line in (30, 300, 900, 1500, 2600):
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            llm.generate(prompts(3), SETTINGS["greedy"])
        assert llm.engine.table.num_free == llm.options.max_num_seqs and not llm._live
        llm.engine.cache.pool.check()
        outputs = llm.generate(prompts(3), SETTINGS["greedy"])
        assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")


class Failing(QuietDrafter):
    """Fails in its third proposal, or while it is told of one."""

    name = "failing"
    max_nodes = 3

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def create(self) -> Failing:
        return self

    def _count(self, where: str) -> None:
        self.calls += self.where == where
        if self.where == where and self.calls == 3:
            raise RuntimeError(f"a fault in {where}")

    def observe(self, seen: Any) -> None:
        self._count("observe")

    def propose(self, context: Context) -> Proposal:
        self._count("propose")
        return Proposal.of_trees([([5], [-1])] * len(context.slot_list), context.table.device, self.name)


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_fails_ends_the_call_and_not_the_engine(where: str) -> None:
    llm = tiny_llm(Failing(where))
    with pytest.raises(RuntimeError, match=f"a fault in {where}"):
        llm.generate(prompts(3), SETTINGS["greedy"])
    assert llm.engine.table.num_free == llm.options.max_num_seqs
    outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")


def test_a_request_that_cannot_be_started_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering fails for one of three: it reports an error, the others are served, and later requests too."""
    real = SamplerState.set

    def refuse(self: SamplerState, slot: int, params: SamplingParams, *rest: Any) -> None:
        if params.seed == 13:
            raise OverflowError("too large for a column")
        real(self, slot, params, *rest)

    monkeypatch.setattr(SamplerState, "set", refuse)
    llm = tiny_llm()
    one, other = SETTINGS["greedy"], SamplingParams(seed=13)
    first, bad, last = llm.generate(prompts(3), [one, other, one])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].error == "the request cannot be started: too large for a column"
    assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == [plain(3, "greedy")[0], plain(3, "greedy")[2]]
    assert not llm.engine.has_work and llm.engine.table.num_free == llm.options.max_num_seqs


def test_work_that_can_never_be_planned_is_an_error_and_not_a_loop() -> None:
    llm = tiny_llm(num_pages=14, max_model_len=200)
    taken = llm.engine.cache.pool.take(14)
    llm.add(Prompt(None, [5, 6, 7]), SETTINGS["greedy"])
    with pytest.raises(EngineError, match=r"1 sequences wait and 0 run, but no work can be planned with 0 of 14 pages"):
        llm.step()
    assert taken is not None
