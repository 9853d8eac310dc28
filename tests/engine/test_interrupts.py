"""Ctrl-C strikes one caller, at any line of what callers share: the others lose nothing, and the engine goes on."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

import pytest

from paceline import LLM, SamplingParams, shared
from tests.engine.interrupting import Interrupt
from tests.fakes import check_books, tiny_llm

PARAMS = SamplingParams(seed=1, max_tokens=2, ignore_eos=True)
PROMPTS = [[5, 6], [7, 8], [9, 10]]


def interrupt_at(line: int) -> Interrupt:
    """Counted in shared.py. Not at a `with`, where tracing stops again between body and end, nor at a `try`: no signal
    is looked for there."""

    def struck(frame: FrameType) -> bool:
        return not linecache.getline(shared.__file__, frame.f_lineno).strip().startswith(("with ", "try:"))

    return Interrupt(line, lambda frame: frame.f_code.co_filename == shared.__file__, struck)


def some_rounds(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]


ACTIONS: dict[str, Callable[[LLM], object]] = {
    "stream": some_rounds,
    "drafter": lambda llm: llm.set_drafter("ngram"),
    "step": lambda llm: llm._take_turn(),
}


@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_at_any_line_of_one_caller_loses_nothing_of_the_others(
    action: str, behind: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(None, behind)
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    real = llm.engine.step

    def step() -> Any:
        assert llm.engine.has_work, "somebody waits for what was lost"
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    line, fired = 0, True
    while fired:
        line += 3 if action == "stream" else 1
        old = llm.stream(PROMPTS[0], PARAMS)
        said = list(next(old).token_ids)
        asked = llm._ask_one(PROMPTS[2], PARAMS, None, {})
        left: Future[Any] = llm._post(partial(llm._add, asked.samples, None))  # another thread's, not done yet
        interrupt = interrupt_at(line)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            ACTIONS[action](llm)
        fired = interrupt.fired
        said += [token for chunk in old for token in chunk.token_ids]
        assert said == plain[0], f"interrupted at line {line}"
        while not asked.samples[0].end_told:
            llm._take_turn()
        assert asked.output().outputs[0].token_ids == plain[2], f"interrupted at line {line}"
        llm._drop(asked.samples)
        while llm._has_work:
            llm._take_turn()
        assert left.done() and left.exception() is None
        assert not (llm._live or llm._boxes or llm._jobs or llm._held.locked())
        check_books(llm)
    assert line > 10, "interrupts must hit something"
