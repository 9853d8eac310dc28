"""Measuring: what is run in which order, what is counted, and how a difference is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from paceline import LLM, NGram, SamplingParams, Suffix
from paceline.bench import compare as bench
from paceline.bench.compare import Comparison, Difference, Plan, Variant, compare, find_differences
from paceline.errors import OptionError, PacelineError
from paceline.prompts import Prompt
from tests.cli.checkpoints import make_model

PROMPTS = [Prompt(None, [5, 6, 7, 8, 5, 6, 7]), Prompt(None, [9, 10, 9, 10, 9]), Prompt(None, [20] * 12)]
NAMES = ["first", "second", "third"]
DRAFTERS = [Variant("ngram", NGram(min_match=1, max_match=2)), Variant("suffix", Suffix())]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(97)


@pytest.fixture
def llm(model: Any) -> LLM:
    return LLM(model, kernels="reference", max_model_len=200, max_num_seqs=1, prefix_caching=False)


def plan(rounds: int = 1, max_tokens: int = 24, **params: Any) -> Plan:
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
    return Plan(NAMES, PROMPTS, chosen, DRAFTERS, rounds)


def test_rounds_are_interleaved_and_every_variant_is_warmed_up_once(llm: LLM) -> None:
    told: list[tuple[str, int, int]] = []
    result = compare(llm, plan(rounds=2, max_tokens=4), lambda *what: told.append(what))
    names = ["plain", "ngram", "suffix"]
    warm = [(name, -1, 0) for name in names]
    timed = [(name, round, done) for round in range(2) for name in names for done in range(4)]
    assert told == warm + timed
    assert [len(measured.passes) for measured in result.measured] == [2, 2, 2]
    assert not result.interrupted


def test_every_pass_has_a_new_drafter_that_cannot_remember_another_pass(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    engine_set = llm.engine.set_drafter

    def watched(drafter: Any, budget: Any = None) -> None:
        if drafter is not None and drafter.name == "suffix":
            seen.append(drafter)
        engine_set(drafter, budget)

    monkeypatch.setattr(llm.engine, "set_drafter", watched)
    compare(llm, plan(rounds=3, max_tokens=4))
    assert len(seen) == len({id(drafter) for drafter in seen}) == 4  # warm-up and three rounds


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_figures_are_those_of_the_answers(llm: LLM, temperature: float) -> None:
    result = compare(llm, plan(rounds=2, temperature=temperature, seed=3))
    plain = result.plain.passes[0].outputs
    by_hand = llm.generate([prompt.ids for prompt in PROMPTS], result.plan.params)
    assert [output.token_ids for output in plain] == [output.outputs[0].token_ids for output in by_hand]
    assert result.plain.stats.tokens_per_forward == 1.0
    assert result.plain.stats.proposed == []
    for measured in result.measured:
        assert measured.passes[0].tokens == 72
        assert measured.stats.tokens == 144
        assert result.num_identical(measured) == 3
        assert measured.stats.rounds == sum(o.stats.rounds for p in measured.passes for o in p.outputs)
        for done in measured.passes:
            assert 0 < done.draft_seconds + done.verify_seconds + done.rest_seconds <= done.seconds
    slow, fast = result.plain, result.measured[1]
    slow.passes[0].seconds, slow.passes[1].seconds = 4.0, 6.0
    fast.passes[0].seconds, fast.passes[1].seconds = 2.0, 2.0
    assert slow.seconds == 5.0
    assert result.speed_up(fast) == pytest.approx(72 / 2 / ((72 / 4 + 72 / 6) / 2))


def test_greedy_drafts_are_accepted_somewhere_so_that_identity_proves_something(llm: LLM) -> None:
    result = compare(llm, plan(max_tokens=60))
    for measured in result.measured[1:]:
        assert sum(measured.stats.accepted) > 0
        assert measured.stats.tokens_per_forward > 1


def planted(result: Comparison, variant: int, prompt: int, position: int, round: int = 0) -> None:
    """Make a variant say another token, as a faulty acceptance would."""
    output = copy.deepcopy(result.measured[variant].passes[round].outputs[prompt])
    output.token_ids[position] = (output.token_ids[position] + 1) % 97
    result.measured[variant].passes[round].outputs[prompt] = output


@pytest.mark.parametrize("position", [0, 7, 23])
def test_a_planted_difference_is_found_with_its_place_and_margin(llm: LLM, model: Any, position: int) -> None:
    result = compare(llm, plan(rounds=2))
    planted(result, variant=2, prompt=1, position=position, round=1)
    find_differences(result, llm)
    assert [len(measured.differences) for measured in result.measured] == [0, 0, 1]
    assert [result.num_identical(measured) for measured in result.measured] == [3, 3, 2]
    (found,) = result.measured[2].differences
    expected = result.plain.passes[0].outputs[1].token_ids
    assert (found.prompt, found.round, found.position) == (1, 1, position)
    assert (found.expected, found.got) == (expected[position], (expected[position] + 1) % 97)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1].ids + expected[:position]])).logits[0, -1]
    top = torch.log_softmax(logits.double(), 0).topk(2).values
    assert found.margin == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_an_answer_that_ends_early_or_late_differs_where_the_other_goes_on(llm: LLM) -> None:
    result = compare(llm, plan())
    short, long = (copy.deepcopy(result.measured[1].passes[0].outputs[number]) for number in (0, 1))
    short.token_ids.pop()
    long.token_ids.append(3)
    result.measured[1].passes[0].outputs[:2] = [short, long]
    find_differences(result, None)
    last = result.plain.passes[0].outputs[0].token_ids[-1]
    assert result.measured[1].differences == [
        Difference(0, 0, 23, last, None, None),
        Difference(1, 0, 24, None, 3, None),
    ]


def test_sampled_text_gets_no_margin(llm: LLM) -> None:
    result = compare(llm, plan(temperature=1.0, seed=1))
    planted(result, variant=1, prompt=0, position=5)
    find_differences(result, llm)
    (found,) = result.measured[1].differences
    assert found.position == 5
    assert found.margin is None


@pytest.mark.parametrize(("passes", "left"), [(0, []), (2, [1, 1]), (4, [2, 1, 1])])
def test_an_interrupt_keeps_the_passes_that_were_complete(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, passes: int, left: list[int]
) -> None:
    real, done = bench.run_pass, -3  # three warm-ups come first

    def limited(*arguments: Any) -> Any:
        nonlocal done
        if done == passes:
            raise KeyboardInterrupt
        done += 1
        return real(*arguments)

    monkeypatch.setattr(bench, "run_pass", limited)
    result = compare(llm, plan(rounds=2, max_tokens=4))
    assert result.interrupted
    assert [len(measured.passes) for measured in result.measured] == left


def test_plans_that_make_no_sense_are_refused() -> None:
    params = SamplingParams(temperature=0.0)
    with pytest.raises(OptionError, match="rounds=0"):
        Plan(NAMES, PROMPTS, params, DRAFTERS, 0)
    with pytest.raises(OptionError, match="'ngram' was given twice"):
        Plan(NAMES, PROMPTS, params, [*DRAFTERS, DRAFTERS[0]])
    with pytest.raises(OptionError, match="is plain decoding"):
        Plan(NAMES, PROMPTS, params, [Variant("none", None)])
    with pytest.raises(OptionError, match="needs a seed"):
        Plan(NAMES, PROMPTS, SamplingParams(temperature=1.0), DRAFTERS)


def test_an_answer_that_failed_is_an_error_and_not_a_figure(model: Any) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    llm = LLM(broken, kernels="reference", max_model_len=200, max_num_seqs=1, prefix_caching=False)
    with pytest.raises(PacelineError, match="prompt 'warm-up' failed: no token can be sampled"):
        compare(llm, plan(max_tokens=4))
