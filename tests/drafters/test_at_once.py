"""Chains drawn in one call of the library: the very drafts that are drawn step by step, and only where they may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline import LLM, DraftModel, Eagle, Glide, SamplingParams
from paceline.engine.budget import FixedBudget
from paceline.engine.context import DraftContext
from paceline.errors import OptionError
from paceline.kernels.cpu.native import NativeOps
from paceline.testing import prompts, tiny_llm, tokens_of
from tests.drafters.contract import DRAFTERS
from tests.drafters.tiny_eagle import tiny_eagle
from tests.drafters.tiny_readers import shared
from tests.fakes import tiny_model
from tests.native import needs_native

pytestmark = needs_native

CHAINS = (
    *("eagle", "eagle3", "draft_model", "draft_is_target", "glide", "glide_layers", "mlp_speculator", "hydra", "mtp"),
)
Drafted = list[list[list[int]]]  # by round, by sequence


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> Iterator[tuple[Drafted, list[int]]]:
    """What is proposed, and how many drafts each call for a chain was asked for."""
    drafts: Drafted = []
    calls: list[int] = []
    drawn, chain = DraftContext.drawn, NativeOps.chain

    def keep(self: DraftContext, *given: Any, **named: Any) -> Any:
        proposal = drawn(self, *given, **named)
        rows = zip(proposal.tokens.tolist(), proposal.sizes.tolist())
        drafts.append([tokens[:size] for tokens, size in rows])
        return proposal

    def count(self: NativeOps, asked: Any, caches: Any) -> Any:
        calls.append(len(asked.links))
        return chain(self, asked, caches)

    with monkeypatch.context() as patch:
        patch.setattr(NativeOps, "chains", at_once)
        patch.setattr(NativeOps, "chain", count)
        patch.setattr(DraftContext, "drawn", keep)
        yield drafts, calls


def run(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(3), params)]


def settings(**changes: Any) -> list[SamplingParams]:
    """For each of three sequences its own seed and length, so that they end in different rounds."""
    return [
        SamplingParams(**{"temperature": 0.0, "seed": 5 + i, "max_tokens": 13 + 3 * i, "ignore_eos": True} | changes)
        for i in range(3)
    ]


PARAMS: dict[str, Callable[[], list[SamplingParams]]] = {
    "greedy": settings,
    "temperature": lambda: settings(temperature=0.7),
    "noise alone": lambda: settings(temperature=1.0),
    "mixed": lambda: [*settings()[:1], *settings(temperature=1.3)[1:]],
}


@functools.cache
def plain(params: str) -> list[list[int]]:
    return run(tiny_llm(kernels="native"), PARAMS[params]())


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_drawn_at_once_is_the_chain_drawn_step_by_step(
    name: str, params: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, wanted = PARAMS[params](), plain(params)
    known = {tuple(p): p + out for p, out in zip(prompts(3), wanted)}
    seen = []
    for at_once in (True, False):
        llm = tiny_llm(DRAFTERS[name](known), kernels="native", block_size=4)
        with watched(monkeypatch, at_once) as (drafts, calls):
            assert run(llm, asked) == wanted
        assert bool(calls) == at_once
        seen.append(drafts)
    assert seen[0] == seen[1]
    assert max(len(tokens) for drafts in seen[0] for tokens in drafts) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 4, "temperature": 0.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 4},
    ],
)
def test_requests_with_other_processors_are_drawn_step_by_step(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(**changes)
    wanted = run(tiny_llm(kernels="native"), asked)
    llm = tiny_llm(Eagle(tiny_eagle("third"), 4), kernels="native")
    with watched(monkeypatch, at_once=True) as (drafts, calls):
        assert run(llm, asked) == wanted
    assert not calls and drafts


@pytest.mark.parametrize("name", ["draft_model", "glide", "mlp_speculator"])
def test_a_budget_beyond_what_a_drafter_drafts_makes_no_longer_chains(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, seen = run(tiny_llm(kernels="native"), settings()), []
    for at_once in (True, False):
        llm = tiny_llm(DRAFTERS[name]({}), kernels="native")
        assert llm.engine.drafter is not None
        most = llm.engine.drafter.max_nodes
        llm.engine.budget = FixedBudget(most + 3)
        with watched(monkeypatch, at_once) as (drafts, _):
            assert run(llm, settings()) == wanted
        assert max(len(tokens) for round in drafts for tokens in round) == most
        seen.append(drafts)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("make", [lambda n: DraftModel(tiny_model(), n), lambda n: Glide(shared("glide"), n)])
def test_chains_longer_than_any_text_take_no_more_memory_than_one(make: Callable[[int], Any]) -> None:
    llm = tiny_llm(make(10**30), kernels="native")
    assert tokens_of(llm, 3, "seeded") == tokens_of(tiny_llm(kernels="native"), 3, "seeded")


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_rule_that_asks_for_distributions_is_served_step_by_step(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(DraftModel(tiny_model(layers=1, hidden=16, seed=1), 4), kernels="native", acceptance=rule)
    with watched(monkeypatch, at_once=True) as (drafts, calls):
        run(llm, settings(temperature=0.9))
        assert not calls and drafts
        run(llm, settings())
        assert calls  # greedy requests ask for none


@pytest.mark.parametrize("params", ["greedy", "mixed"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_chain_ends_where_the_head_finds_it_unlikely(
    at_once: bool, params: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, wanted = PARAMS[params](), plain(params)
    counts = []
    for least in (0.0, 0.02, 0.2, 1.0):
        llm = tiny_llm(Eagle(tiny_eagle("third"), 4, min_probability=least), kernels="native")
        with watched(monkeypatch, at_once) as (drafts, calls):
            assert run(llm, asked) == wanted
        assert bool(calls) == at_once
        counts.append(sum(len(tokens) for round in drafts for tokens in round))
    assert counts[0] > counts[1] > counts[3] == 0


def test_both_ways_end_chains_at_the_same_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for at_once in (True, False):
        llm = tiny_llm(Eagle(tiny_eagle("third"), 4, min_probability=0.02), kernels="native")
        with watched(monkeypatch, at_once) as (drafts, _):
            run(llm, PARAMS["mixed"]())
        seen.append(drafts)
    assert seen[0] == seen[1]


def test_a_chain_drafted_in_parallel_ends_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, counts = run(tiny_llm(kernels="native"), settings()), []
    for least in (0.0, 0.02, 1.0):
        llm = tiny_llm(Eagle(tiny_eagle("parallel"), 4, min_probability=least), kernels="native")
        with watched(monkeypatch, at_once=True) as (drafts, calls):
            assert run(llm, settings()) == wanted
        assert not calls
        counts.append(sum(len(tokens) for round in drafts for tokens in round))
    assert counts[0] > counts[1] > counts[2] == 0


@pytest.mark.parametrize("given", [-0.1, 1.5, "much", True, float("nan")])
def test_a_probability_lies_between_0_and_1(given: Any) -> None:
    with pytest.raises(OptionError, match=r"^min_probability=.* is not allowed; allowed: a number from 0 up to 1$"):
        Eagle("somewhere", min_probability=given)
