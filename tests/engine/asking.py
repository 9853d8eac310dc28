"""Requests to tiny models, and what plain decoding answers them, for the tests of what may be asked."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.drafters.base import Context
from paceline.engine.stats import EngineStats
from paceline.outputs import CompletionOutput
from tests.fakes import VOCAB, Oracle, set_apart, tiny_llm, tiny_model
from tests.tokens import NUM_IDS, tokenizer

BEHIND = pytest.mark.parametrize("behind", [None, 1, 2])
PROMPT = [5, 9, 22, 41, 7, 3, 80, 61]
LONG = [(7 * i + 3) % VOCAB for i in range(40)]


@functools.cache
def shared() -> LLM:
    return tiny_llm()


def run(llm: LLM, prompt: list[int], **params: Any) -> CompletionOutput:
    (output,) = llm.generate([prompt], SamplingParams(**{"ignore_eos": True, **params}))[0].outputs
    return output


@functools.cache
def recorded(prompt: tuple[int, ...], max_tokens: int = 24, **params: Any) -> list[int]:
    """The whole plain sequence."""
    return [*prompt, *run(shared(), list(prompt), max_tokens=max_tokens, **params).token_ids]


def plain(prompt: list[int], count: int) -> list[int]:
    return recorded(tuple(prompt), temperature=0.0)[len(prompt) :][:count]


class Watched(Oracle):
    """Notes the length and the budget of every sequence it drafts for."""

    def __init__(self, prompts: list[list[int]], num_draft_tokens: int, **params: Any) -> None:
        super().__init__(
            {tuple(p): recorded(tuple(p), **(params or {"temperature": 0.0})) for p in prompts}, num_draft_tokens
        )
        self.seen: list[tuple[int, int]] = []

    def propose(self, context: Context) -> Any:
        self.seen += zip(context.lengths.tolist(), context.budgets.tolist())
        return super().propose(context)


class Scripted:
    """A budget that says what it was told to, over and over."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = itertools.cycle(nodes)

    def choose(self, num_running: int, history: EngineStats) -> int:
        return next(self.nodes)


def assert_empty(llm: LLM) -> None:
    """Nothing is left behind: no sequence, no page, no slot."""
    scheduler = llm.engine.scheduler
    scheduler.pool.check()
    assert not llm.engine.has_work and not llm._live
    assert scheduler.pool.num_available == scheduler.pool.num_pages
    assert scheduler.slots.num_free == scheduler.slots.num_slots


@functools.cache
def speaking(behind: int | None = None) -> LLM:
    llm = LLM(tiny_model(vocab=NUM_IDS), tokenizer=tokenizer(), kernels="reference", max_model_len=64)
    return llm if behind is None else set_apart(llm, behind)


def never_idle(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    """Fail instead of waiting for ever for an update that will not come."""
    step = llm.engine.step

    def checked() -> Any:
        assert llm.engine.has_work, "somebody waits for an update that was lost"
        return step()

    patch.setattr(llm.engine, "step", checked)
    return llm
