"""One engine, several threads: what one asks for while another is at a round is there at the next."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from paceline import LLM, DraftModel, NGram
from paceline.drafters.base import QuietDrafter
from tests.drafters.contract import SETTINGS, plain, prompts
from tests.fakes import check_books, tiny_llm, tiny_model

PARAMS = SETTINGS["greedy"]


def wait_until(true: Callable[[], object]) -> None:
    """Of what another thread is about to do; the limit is for a test that fails."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "another thread never came so far"
        time.sleep(0.0005)


def at_step(llm: LLM, number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Do something in a thread of its own during a step, and let the step go on when the engine has been asked for it.
    Returns the threads of all steps."""
    real, threads = llm.engine.step, list[int]()

    def step() -> Any:
        threads.append(threading.get_ident())
        if len(threads) == number:
            threading.Thread(target=act, daemon=True).start()
            wait_until(lambda: llm._jobs)
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    return threads


@pytest.mark.parametrize("behind", [None, 1])
def test_a_request_of_another_thread_is_in_the_next_rounds_batch(
    behind: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(None, behind)
    found: list[list[int]] = []
    at_step(llm, 3, lambda: found.append(ask_for(llm, 1)), monkeypatch)
    assert ask_for(llm, 0) == plain(3, "greedy")[0]
    wait_until(lambda: found)
    assert found == [plain(3, "greedy")[1]]
    sequences = [record.sequences for record in llm.engine.stats.recent]
    both = PARAMS.max_tokens or 0
    assert sequences[:4] == [1, 1, 1, 2] and sequences.count(2) in (both - 3, both - 2), "they ran one after the other"


def ask_for(llm: LLM, number: int) -> list[int]:
    (output,) = llm.generate([prompts(3)[number]], PARAMS)
    return output.outputs[0].token_ids


def test_who_waits_while_another_is_at_a_round_gets_what_that_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    real, steps, heard = llm.engine.step, [], deque[Any]()
    llm._queue(llm._ask_one(prompts(1)[0], PARAMS, None, {}).samples, heard.append)
    other = threading.Thread(target=llm._take_turn)

    def step() -> Any:
        steps.append(threading.current_thread())
        if len(steps) == 1:
            other.start()
            wait_until(lambda: llm._turns._waiters)  # type: ignore[attr-defined]
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    llm._take_turn()
    other.join()
    assert steps == [threading.current_thread()] and heard[0].tokens == plain(1, "greedy")[0][:1]


def test_another_drafter_is_there_at_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    at_step(llm, 3, lambda: llm.set_drafter(DraftModel(tiny_model(), 3)), monkeypatch)
    (output,) = llm.generate([prompts(1)[0]], PARAMS)
    assert output.outputs[0].token_ids == plain(1, "greedy")[0]
    assert {entry.round for entry in output.outputs[0].provenance if entry.kind == "plain"} >= {0, 1, 2}
    assert any(record.proposed for record in list(llm.engine.stats.recent)[3:])
    assert not any(record.proposed for record in list(llm.engine.stats.recent)[:3])


def test_an_abort_of_another_thread_ends_a_request_before_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    at_step(llm, 3, lambda: llm.abort(next(iter(llm._live))), monkeypatch)
    (output,) = llm.generate([prompts(1)[0]], PARAMS)
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == plain(1, "greedy")[0][:3]


class Unfit(QuietDrafter):
    name = "unfit"

    def create(self) -> Unfit:
        return self

    def attach(self, target: Any, cache: Any) -> None:
        raise ValueError("this drafter does not fit")


def test_what_goes_wrong_in_a_job_is_told_to_who_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    told: list[str] = []

    def change() -> None:
        try:
            llm.set_drafter(Unfit())
        except ValueError as error:
            told.append(str(error))

    at_step(llm, 3, change, monkeypatch)
    assert ask_for(llm, 0) == plain(3, "greedy")[0]
    wait_until(lambda: told)
    assert told == ["this drafter does not fit"]


def test_a_step_that_fails_in_one_thread_leaves_the_others_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    found: list[list[int]] = []
    threads = at_step(llm, 3, lambda: found.append(ask_for(llm, 1)), monkeypatch)
    real, main = llm.engine.runner.run, threading.get_ident()

    def run(*given: Any) -> Any:
        if len(threads) > 3 and threads[-1] == main:
            raise MemoryError("no room")
        return real(*given)

    monkeypatch.setattr(llm.engine.runner, "run", run)
    with pytest.raises(MemoryError):
        while True:  # whichever thread takes the next step: sooner or later it is this one
            llm.generate([prompts(3)[0]], PARAMS)
    wait_until(lambda: found)
    assert found == [plain(3, "greedy")[1]]
    check_books(llm)


@pytest.mark.parametrize("behind", [None, 2])
def test_threads_may_ask_for_everything_at_once(behind: int | None) -> None:
    """Calls, streams, some left or aborted in the middle, other drafters: everybody's text is as if they were alone."""
    llm = tiny_llm(None, behind, block_size=4, max_num_seqs=5)
    wanted = plain(3, "greedy")
    faults: list[BaseException] = []

    def act(number: int) -> None:
        chooser = random.Random(number)
        for turn in range(4):
            which = chooser.randrange(3)
            stream: Any = llm.stream(prompts(3)[which], PARAMS)
            if number % 4 == 0:
                assert ask_for(llm, which) == wanted[which]
            elif number % 4 == 1:
                assert [token for chunk in stream for token in chunk.token_ids] == wanted[which]
            elif number % 4 == 2:
                chunks = [next(stream)]
                if turn % 2:
                    llm.abort(chunks[0].request_id)
                    chunks += list(stream)
                    assert chunks[-1].output is not None and chunks[-1].output.finish_reason in ("abort", "length")
                stream.close()
                tokens = [token for chunk in chunks for token in chunk.token_ids]
                assert tokens == wanted[which][: len(tokens)]
            else:
                llm.set_drafter([None, NGram(4, min_match=1, max_match=3), "suffix"][turn % 3])

    def guard(number: int) -> None:
        try:
            act(number)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guard, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    check_books(llm)
    assert not llm.engine.has_work and not llm._live and not llm._boxes and not llm._jobs
    assert llm.engine.table.num_free == llm.options.max_num_seqs
