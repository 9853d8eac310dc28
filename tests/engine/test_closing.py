"""`close()` and `with`: memory comes back, those who wait are told, whoever comes later gets one sentence."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from paceline import LLM, NGram
from paceline.errors import EngineError
from tests.drafters.contract import SETTINGS, plain, prompts
from tests.fakes import tiny_llm

pytestmark = pytest.mark.usefixtures("settled")
PARAMS = SETTINGS["greedy"]
LATER: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([[5]], PARAMS),
    "stream": lambda llm: next(iter(llm.stream([5], PARAMS))),
    "add": lambda llm: llm.add([5], PARAMS),
    "step": lambda llm: llm.step(),
    "score": lambda llm: llm.score([[5, 6]]),
    "set_drafter": lambda llm: llm.set_drafter("ngram"),
}


@pytest.fixture(scope="module")
def closed() -> LLM:
    with tiny_llm() as llm:
        assert llm.generate(prompts(1), PARAMS)[0].outputs[0].token_ids == plain(1, "greedy")[0]
    return llm


@pytest.mark.parametrize("call", LATER)
def test_a_later_call_is_refused_with_a_sentence(closed: LLM, call: str) -> None:
    with pytest.raises(EngineError, match=r"^this LLM is closed; make a new one to go on$"):
        LATER[call](closed)


def test_closing_again_and_aborting_do_nothing(closed: LLM) -> None:
    closed.close()
    closed.abort("0")
    assert closed.get_tokenizer() is None and not closed._jobs


@pytest.mark.parametrize("drafter", [None, NGram(4)])
def test_weights_and_cache_are_freed(drafter: Any) -> None:
    llm = tiny_llm(drafter)
    llm.generate(prompts(1), PARAMS)
    engine = llm.engine
    kept = [weakref.ref(thing) for thing in (engine, llm.model, engine.cache, *engine.cache.layers[0])]
    del engine
    llm.close()
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("behind", [None, 2])
def test_requests_under_way_are_aborted_and_told(behind: int | None) -> None:
    llm = tiny_llm(None, behind)
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts(3)]
    first = [next(stream) for stream in streams]
    llm.close()
    for chunk, stream, said in zip(first, streams, plain(3, "greedy")):
        chunks = [chunk, *stream]
        output = chunks[-1].output
        assert output is not None and output.finish_reason == "abort"
        tokens = [token for one in chunks for token in one.token_ids]
        assert tokens == output.token_ids == said[: len(tokens)]


def test_a_call_in_another_thread_comes_back_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    real, steps = llm.engine.step, 0
    inside, go_on = threading.Event(), threading.Event()

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            inside.set()
            assert go_on.wait(60)
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(llm.generate(prompts(1), PARAMS)))
    closing = threading.Thread(target=llm.close)
    asking.start()
    assert inside.wait(60)
    closing.start()
    while not llm._jobs:
        pass
    go_on.set()
    asking.join()
    closing.join()
    monkeypatch.undo()
    assert found[0].outputs[0].finish_reason == "abort"
    assert found[0].outputs[0].token_ids == plain(1, "greedy")[0][:3]


def test_a_stream_left_after_the_end_is_no_trouble() -> None:
    llm = tiny_llm()
    stream: Any = llm.stream(prompts(1)[0], PARAMS)
    next(stream)
    llm.close()
    stream.close()
    assert not llm._jobs


def test_an_engine_that_fails_while_it_is_closed_is_freed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    stream = llm.stream(prompts(1)[0], PARAMS)
    next(stream)

    def fail() -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.engine, "step", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.close()
    monkeypatch.undo()
    assert not hasattr(llm, "engine") and not hasattr(llm, "model")
    with pytest.raises(EngineError, match="closed"):
        list(stream)
