"""Streams, updates and aborts: what is told while a text is made, and what is left when nobody listens."""

from __future__ import annotations

import asyncio
import copy
import itertools
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, NGram, SamplingParams
from paceline.engine import engine
from paceline.engine.update import Update
from paceline.outputs import CompletionOutput, Gathered
from paceline.prompts import Prompt
from tests.engine.asking import (
    BEHIND,
    LONG,
    PROMPT,
    assert_empty,
    never_idle,
    plain,
    run,
    speaking,
)
from tests.fakes import check_books, tiny_llm, tiny_model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@BEHIND
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_what_generate_says(behind: int | None, n: int) -> None:
    params = SamplingParams(temperature=0.9, seed=8, max_tokens=10, n=n, ignore_eos=True)
    whole = speaking().generate([PROMPT], params)[0].outputs
    chunks = list(speaking(behind).stream(PROMPT, params))
    for output in whole:
        own = [chunk for chunk in chunks if chunk.index == output.index]
        assert "".join(chunk.text for chunk in own) == output.text
        assert [token for chunk in own for token in chunk.token_ids] == output.token_ids
        assert [told for chunk in own for told in chunk.provenance] == output.provenance
        assert [chunk.output is not None for chunk in own] == [False] * (len(own) - 1) + [True]
    assert_empty(speaking(behind))


def test_updates_are_made_for_who_takes_them_as_they_come(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the end has the last alone, beside a stream that has them all."""
    made: list[Update] = []

    def make(*given: Any) -> Update:
        made.append(Update(*given))
        return made[-1]

    monkeypatch.setattr(engine, "Update", make)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    llm.generate([PROMPT], params)
    assert [(update.num_tokens, update.finished) for update in made] == [(6, True)]
    made.clear()
    stream = llm.stream(PROMPT, params)
    first = next(stream)
    llm.generate([PROMPT], params)
    chunks = [first, *stream]
    assert [update.num_tokens for update in made if update.request_id == first.request_id] == [1, 2, 3, 4, 5, 6]
    assert len(chunks) == 6 and len(made) == 7
    made.clear()

    async def ask() -> None:
        async with AsyncLLM(tiny_model()) as other:
            await other.generate([PROMPT], params)

    asyncio.run(ask())
    assert [(update.num_tokens, update.finished) for update in made] == [(6, True)]


@pytest.mark.parametrize("behind", [None, 0, 1, 2])
@pytest.mark.parametrize("drafter", [None, NGram(3, max_match=1)])
def test_leaving_a_stream_in_the_middle_frees_everything(drafter: Any, behind: int | None) -> None:
    llm = tiny_llm(drafter, behind=behind)
    stream = llm.stream(LONG, SamplingParams(max_tokens=50, n=2, ignore_eos=True))
    for _ in range(5):
        next(stream)
    assert llm.engine.scheduler.pool.num_available < llm.engine.scheduler.pool.num_pages
    stream.close()
    ends = []
    while llm.engine.has_work:  # a round in flight still has its pages
        check_books(llm)
        ends += [(u.request_id, u.index, u.tokens, u.text, u.finish_reason, u.stats is None) for u in llm.step()]
    assert ends == [], "nobody is there to hear of it"
    assert_empty(llm)
    assert run(llm, PROMPT, temperature=0.0, max_tokens=4).token_ids == plain(PROMPT, 4)


@BEHIND
def test_an_abort_is_told_at_the_next_step_even_if_nothing_else_is_left(behind: int | None) -> None:
    llm = tiny_llm(behind=behind)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0)
    waiting = llm.add(Prompt(None, PROMPT), params)
    llm.abort(waiting)
    assert llm.engine.has_work, "somebody has to be told"
    (update,) = llm.step()
    assert (update.request_id, update.finish_reason, update.tokens, update.logprobs) == (waiting, "abort", [], [])
    assert_empty(llm)
    running = llm.add(Prompt(None, PROMPT), params)
    said: list[int] = []
    while len(said) < 3:
        said += [token for update in llm.step() for token in update.tokens]
    llm.abort(running)
    llm.abort(running)
    updates = []
    while llm.engine.has_work:
        updates += llm.step()
        check_books(llm)
    assert [(update.finish_reason, update.tokens) for update in updates] == [("abort", [])], "rounds behind it are void"
    assert updates[0].stats is not None and updates[0].stats.tokens == len(said) and said == plain(PROMPT, len(said))
    assert_empty(llm)


@BEHIND
def test_an_update_is_a_value_and_updates_add_up_to_the_sample(behind: int | None) -> None:
    params = SamplingParams(temperature=0.9, seed=8, max_tokens=10, n=2, logprobs=1, ignore_eos=True)
    whole = run_all(speaking(), params)
    llm = speaking(behind)
    request = llm.add(Prompt(None, PROMPT), params)
    gathered = {index: Gathered() for index in (0, 1)}
    updates, copies, found = [], [], {}
    while llm.engine.has_work:
        for update in llm.step():
            assert update.request_id == request
            updates.append(update)
            copies.append(copy.deepcopy(update))
            output = gathered[update.index].add(update)
            assert (output is not None) == update.finished == (update.stats is not None)
            if output is not None:
                found[output.index] = output
    assert updates == copies, "an update changed after it was handed out"
    for output in whole:
        assert told(found[output.index]) == told(output)


def told(output: CompletionOutput) -> Any:
    """All of a sample but the time it took."""
    stats = output.stats
    figures = (stats.tokens, stats.rounds, stats.proposed, stats.accepted, stats.preemptions)
    return (*(getattr(output, name) for name in TOLD), figures)


TOLD = ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "seed", "provenance", "error")


def run_all(llm: LLM, params: SamplingParams) -> list[CompletionOutput]:
    return llm.generate([PROMPT], params)[0].outputs


def test_an_unknown_request_may_be_aborted(llm: LLM) -> None:
    llm.abort("never was")
    assert_empty(llm)


@BEHIND
def test_two_streams_side_by_side_both_get_their_text(behind: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = never_idle(tiny_llm(behind=behind), monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    streams = [llm.stream(PROMPT, params), llm.stream(LONG, params)]
    got: list[list[int]] = [[], []]
    while any(len(tokens) < 6 for tokens in got):
        for tokens, stream in zip(got, streams):
            tokens += [token for chunk in itertools.islice(stream, 1) for token in chunk.token_ids]
    assert got == [plain(PROMPT, 6), plain(LONG, 6)]
