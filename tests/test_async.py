"""AsyncLLM: what tasks get, that the loop goes on meanwhile, and what cancelling, leaving, failing and closing do."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
import torch

from paceline import LLM, AsyncLLM, NGram, SamplingParams
from paceline.errors import EngineError, OptionError
from tests.drafters.contract import SETTINGS, plain, prompts
from tests.fakes import check_books, set_apart, tiny_model
from tests.tokens import NUM_IDS, tokenizer

pytestmark = pytest.mark.usefixtures("settled")
PARAMS = SETTINGS["greedy"]
PAUSE = 0.001  # between looks at what another thread does, which needs the interpreter meanwhile


def make(drafter: Any = None, behind: int | None = None, **options: Any) -> AsyncLLM:
    given = {"kernels": "reference", "max_model_len": 200, "device": "cpu", "block_size": 4, **options}
    made = AsyncLLM(tiny_model(), None if behind is not None else drafter, **given)
    if behind is not None:
        set_apart(made.llm, behind)
        made.llm.set_drafter(drafter)
    return made


def run(act: Callable[[AsyncLLM], Coroutine[Any, Any, None]], behind: int | None = None, **options: Any) -> None:
    """In a loop of its own; then nothing may be left behind."""

    async def acted() -> None:
        async with make(behind=behind, **options) as llm:
            await act(llm)
            await settle(llm)
            check_books(llm.llm)
            assert not llm.llm._live and not llm.llm._boxes
            assert llm.llm.engine.table.num_free == llm.llm.options.max_num_seqs
        assert llm._pump._thread is None or not llm._pump._thread.is_alive()

    asyncio.run(acted())


async def settle(llm: AsyncLLM) -> None:
    """Until the pump has done all that was asked for before."""
    await llm.abort("nobody")
    while llm.llm._has_work:
        await asyncio.sleep(PAUSE)


def hold(llm: AsyncLLM, number: int) -> threading.Event:
    """Let the engine's n-th step, and those after it, wait for this event: so the engine cannot be done too soon."""
    engine: Any = llm.llm.engine
    real, steps, go_on = engine.step, itertools.count(1), threading.Event()

    def step() -> Any:
        assert next(steps) < number or go_on.wait(60), "nobody let the step go on"
        return real()

    engine.step = step
    return go_on


def num_asked(llm: AsyncLLM) -> int:
    """Requests that are queued, or about to be."""
    return len(llm.llm._live) + len(llm.llm._jobs)


async def tokens_of(stream: Any) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


@pytest.mark.parametrize("behind", [None, 2])
@pytest.mark.parametrize("drafter", [None, NGram(4, min_match=1, max_match=3)])
def test_tasks_share_a_batch_and_each_gets_its_own_text(drafter: Any, behind: int | None) -> None:
    async def act(llm: AsyncLLM) -> None:
        go_on = hold(llm, 1)
        streams = [asyncio.create_task(tokens_of(llm.stream(prompt, PARAMS))) for prompt in prompts(3)]
        whole = asyncio.create_task(llm.generate(prompts(3), PARAMS))
        while num_asked(llm) < 6:
            await asyncio.sleep(PAUSE)
        go_on.set()
        *streamed, outputs = await asyncio.gather(*streams, whole)
        assert streamed == [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")
        assert max(record.sequences for record in llm.llm.engine.stats.recent) == 6

    run(act, behind, drafter=drafter)


def test_rounds_are_shorter_where_somebody_waits_for_every_token() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with LLM(tiny_model(), device="cpu", kernels="reference", max_model_len=40) as llm:
        assert (llm._usual_rows(gpu), llm._usual_rows(cpu), llm.engine.scheduler.max_batched_tokens) == (8192, 256, 256)
    for given, wanted in (({}, 256), ({"max_batched_tokens": 30}, 30)):
        streamed = make(**given)
        assert (streamed.llm._usual_rows(gpu), streamed.llm._usual_rows(cpu)) == (2048, 256)
        assert streamed.llm.engine.scheduler.max_batched_tokens == wanted
        asyncio.run(streamed.close())


def test_chat_stream_and_score_say_what_the_llm_says() -> None:
    import copy

    own = copy.deepcopy(tokenizer())
    own.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tools | length if tools else '' }}"
    messages, tools = [{"role": "user", "content": [{"type": "text", "text": "the rider"}]}], [{"name": "bell"}]

    async def act() -> None:
        options = {"kernels": "reference", "max_model_len": 64, "device": "cpu"}
        async with AsyncLLM(tiny_model(vocab=NUM_IDS), None, own, **options) as llm:
            assert llm.get_tokenizer() is own
            few: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 5, "tools": tools}
            (found,) = await llm.chat(messages, **few)
            (wanted,) = await asyncio.to_thread(llm.llm.chat, messages, **few)
            assert (found.prompt, found.outputs[0].text) == ("[the rider]1", wanted.outputs[0].text)
            chunks = [chunk async for chunk in llm.stream(messages, **few)]
            assert "".join(chunk.text for chunk in chunks) == found.outputs[0].text
            assert await llm.score("the rider rides") == await asyncio.to_thread(llm.llm.score, "the rider rides")

    asyncio.run(act())


def test_what_is_refused_is_raised_where_it_is_awaited() -> None:
    async def act(llm: AsyncLLM) -> None:
        for call in (llm.generate("text", PARAMS), llm.generate([[5]], temperature=-1.0), tokens_of(llm.stream([]))):
            with pytest.raises(OptionError):
                await call

    run(act)


# The loop goes on


def test_the_loop_runs_while_the_engine_is_at_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that waits for the loop would wait for ever if the loop waited for the round."""

    async def act(llm: AsyncLLM) -> None:
        real, go_on, threads = llm.llm.engine.step, threading.Event(), set[int]()

        def step() -> Any:
            threads.add(threading.get_ident())
            assert go_on.wait(60)
            go_on.clear()
            return real()

        monkeypatch.setattr(llm.llm.engine, "step", step)
        task = asyncio.create_task(llm.generate(prompts(1), PARAMS))
        while not task.done():
            go_on.set()
            await asyncio.sleep(PAUSE)
        monkeypatch.undo()
        assert task.result()[0].outputs[0].token_ids == plain(1, "greedy")[0]
        assert len(threads) == 1 and threading.get_ident() not in threads

    run(act)


def test_prompts_are_read_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(llm: AsyncLLM) -> None:
        real, threads = llm.llm._prepare, set[int]()

        def prepare(*given: Any) -> Any:
            threads.add(threading.get_ident())
            return real(*given)

        monkeypatch.setattr(llm.llm, "_prepare", prepare)
        await llm.generate(prompts(1), PARAMS)
        await tokens_of(llm.stream(prompts(1)[0], PARAMS))
        assert threads and threading.get_ident() not in threads

    run(act)


def test_a_request_joins_the_batch_at_the_next_round_and_the_thread_sleeps_when_all_is_done() -> None:
    async def act(llm: AsyncLLM) -> None:
        go_on = hold(llm, 3)
        first = llm.stream(prompts(3)[0], PARAMS)
        await anext(first)
        second = asyncio.create_task(tokens_of(llm.stream(prompts(3)[1], PARAMS)))
        while num_asked(llm) < 2:
            await asyncio.sleep(PAUSE)
        go_on.set()
        await tokens_of(first)
        assert await second == plain(3, "greedy")[1]
        assert {record.sequences for record in llm.llm.engine.stats.recent} == {1, 2}
        await settle(llm)
        while not llm._pump.asleep:
            await asyncio.sleep(PAUSE)
        assert not llm.llm._has_work

    run(act)


# Leaving


async def freed(llm: AsyncLLM) -> bool:
    """Whether slots and pages have come back once the pump has done what was asked."""
    await llm.abort("nobody")
    while llm.llm.engine._in_flight:
        await asyncio.sleep(PAUSE)
    return llm.llm.engine.table.num_free == llm.llm.options.max_num_seqs and not llm.llm._live


@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_cancelling_a_task_aborts_its_requests_at_once(how: str, behind: int | None) -> None:
    async def act(llm: AsyncLLM) -> None:
        go_on = hold(llm, 4)
        call = llm.generate(prompts(1), PARAMS) if how == "generate" else tokens_of(llm.stream(prompts(1)[0], PARAMS))
        task = asyncio.create_task(call)
        while not llm.llm.engine.stats.rounds:
            await asyncio.sleep(PAUSE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await freed(llm) and llm.llm.engine.stats.rounds <= 4
        assert (await llm.generate(prompts(1), PARAMS))[0].outputs[0].token_ids == plain(1, "greedy")[0]

    run(act, behind)


@pytest.mark.parametrize("how", ["break", "aclose", "aclosing", "let go", "let go in a round"])
def test_leaving_a_stream_aborts_its_request_at_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(llm: AsyncLLM) -> None:
        go_on, kept = hold(llm, 4), list[Any]()
        if how == "break":
            async for chunk in llm.stream(prompts(1)[0], PARAMS):
                assert chunk.token_ids
                break
        elif how == "aclosing":
            async with aclosing(llm.stream(prompts(1)[0], PARAMS)) as stream:
                await anext(stream)
        else:
            stream = llm.stream(prompts(1)[0], PARAMS)
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
                assert [chunk async for chunk in stream] == []
            elif how == "let go in a round":  # as a garbage collector may, in the engine's own thread
                kept.append(stream)
                real = llm.llm.engine.runner.run
                monkeypatch.setattr(llm.llm.engine.runner, "run", lambda *given: (kept.clear(), real(*given))[1])
            del stream
        go_on.set()
        while how == "let go in a round" and not await freed(llm):
            await asyncio.sleep(PAUSE)
        assert await freed(llm) and llm.llm.engine.stats.rounds <= 4

    run(act)


def test_an_abort_by_id_ends_a_stream_and_says_so() -> None:
    async def act(llm: AsyncLLM) -> None:
        go_on = hold(llm, 4)
        stream = llm.stream(prompts(1)[0], PARAMS)
        chunks = [await anext(stream)]
        aborting = asyncio.create_task(llm.abort(chunks[0].request_id))
        await asyncio.sleep(0)
        go_on.set()
        await aborting
        assert await freed(llm)
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].output is not None and chunks[-1].output.finish_reason == "abort"
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == plain(1, "greedy")[0][: len(tokens)]

    run(act)


def test_requests_of_a_loop_that_is_gone_are_dropped() -> None:
    llm = make()
    kept: list[Any] = []

    async def begin() -> None:
        endless = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
        kept.append(llm.stream(prompts(1)[0], endless))
        await anext(kept[0])

    async def go_on() -> None:
        assert (await llm.generate(prompts(1), PARAMS))[0].outputs[0].token_ids == plain(1, "greedy")[0]
        while not await freed(llm):
            await asyncio.sleep(PAUSE)
        await llm.close()

    asyncio.run(begin())
    asyncio.run(go_on())


# Failing and closing


def test_a_round_that_fails_is_told_to_all_who_wait_and_the_next_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(llm: AsyncLLM) -> None:
        go_on = hold(llm, 4)

        def fail(*ignored: Any) -> Any:
            raise RuntimeError("the device is gone")

        stream = llm.stream(prompts(3)[0], PARAMS)
        await anext(stream)
        asked = asyncio.create_task(llm.generate(prompts(3), PARAMS))
        while num_asked(llm) < 4:
            await asyncio.sleep(PAUSE)
        monkeypatch.setattr(llm.llm.engine.runner, "run", fail)
        go_on.set()
        found = await asyncio.gather(tokens_of(stream), asked, return_exceptions=True)
        assert [str(fault) for fault in found] == ["the device is gone"] * 2
        monkeypatch.undo()
        assert (await llm.generate(prompts(1), PARAMS))[0].outputs[0].token_ids == plain(1, "greedy")[0]

    run(act)


def test_closing_tells_those_who_wait_and_refuses_those_who_come() -> None:
    async def act() -> None:
        llm = make()
        go_on = hold(llm, 4)
        stream = llm.stream(prompts(1)[0], PARAMS)
        await anext(stream)
        closing = asyncio.create_task(llm.close())
        while not llm.llm._jobs and not llm.llm._closed:
            await asyncio.sleep(PAUSE)
        go_on.set()
        await closing
        *_, last = [chunk async for chunk in stream]
        assert last.output is not None and last.output.finish_reason == "abort"
        for call in (llm.generate(prompts(1), PARAMS), tokens_of(llm.stream([5])), llm.set_drafter(None)):
            with pytest.raises(EngineError, match="this LLM is closed"):
                await call
        await llm.abort("0")
        await llm.close()

    asyncio.run(act())


def test_a_request_read_before_the_end_and_queued_after_it_is_refused() -> None:
    async def act() -> None:
        llm = make()
        asked = llm.llm._ask(prompts(1), PARAMS, {})
        await llm.generate(prompts(1), PARAMS)
        await asyncio.to_thread(llm.llm.close)  # the LLM alone: the pump does not know yet
        with pytest.raises(EngineError, match="this LLM is closed"):
            await asyncio.wait_for(llm._finish(lambda: asked), 60)
        await llm.close()

    asyncio.run(act())


def test_one_that_nobody_holds_ends_its_thread_and_frees_its_memory() -> None:
    async def act() -> tuple[Any, Any]:
        llm = make()
        await llm.generate(prompts(1), PARAMS)
        return weakref.ref(llm.llm.engine), llm._pump._thread

    engine, thread = asyncio.run(act())
    gc.collect()
    thread.join(60)
    gc.collect()
    assert not thread.is_alive() and engine() is None
