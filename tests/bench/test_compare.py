"""Measuring: what is run in which order, what is counted, and how a difference is found."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, NGram, SamplingParams, Suffix
from paceline.bench import compare as bench
from paceline.bench import differences
from paceline.bench.compare import compare, find_differences
from paceline.bench.differences import Difference
from paceline.bench.measured import Comparison, Pass, Plan, Variant
from paceline.bench.results import labels
from paceline.errors import OptionError, PacelineError
from tests.bench.asked import NAMES, PROMPTS
from tests.cli.checkpoints import make_model

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


def test_variants_take_turns_at_every_prompt_there_and_back_and_are_warmed_up_once(llm: LLM) -> None:
    told: list[tuple[str, int, int]] = []
    result = compare(llm, plan(rounds=2, max_tokens=4), lambda *what: told.append(what))
    names = ["plain", "ngram", "suffix"]
    timed = [
        (name, round, prompt + ended)
        for round in range(2)
        for prompt in range(3)
        for name in names[:: -1 if (prompt + round) % 2 else 1]
        for ended in (0, 1)
    ]
    assert told == [(name, -1, 0) for name in names] + timed
    assert [len(measured.passes) for measured in result.measured] == [2, 2, 2]
    assert not result.interrupted


def test_prompts_answered_together_and_models_loaded_anew_take_turns_pass_by_pass(model: Any) -> None:
    told: list[tuple[str, int, int]] = []
    variants = [
        Variant("ngram", NGram()),
        Variant("a", DraftModel(model, 2)),
        Variant("b", DraftModel(make_model(97), 2)),
    ]
    for sequences, drafters in ((2, DRAFTERS), (1, variants)):
        llm = LLM(model, kernels="reference", max_model_len=200, max_num_seqs=sequences, prefix_caching=False)
        told.clear()
        compare(llm, replace(plan(rounds=2, max_tokens=3), drafters=drafters), lambda *what: told.append(what))
        names = ["plain", *(variant.name for variant in drafters)]
        begun = [(name, round) for name, round, done in told if done == 0 and round >= 0]
        assert begun == [(name, 0) for name in names] + [(name, 1) for name in reversed(names)]


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
    assert len(seen) == 1 + 3 * 3  # the warm-up, and three prompts in each of three rounds
    made = [drafter if (held := getattr(drafter, "_drafter", None)) is None else held for drafter in seen]
    assert [made.index(drafter) for drafter in made] == [0, 1, 1, 1, 4, 4, 4, 7, 7, 7]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_figures_are_those_of_the_answers(llm: LLM, temperature: float) -> None:
    result = compare(llm, plan(rounds=2, temperature=temperature, seed=3))
    plain = [answer.output for answer in result.plain.passes[0].answers]
    by_hand = llm.generate([prompt.ids for prompt in PROMPTS], result.plan.params)
    assert [output.token_ids for output in plain] == [output.outputs[0].token_ids for output in by_hand]
    assert result.plain.stats.tokens_per_forward == 1.0
    assert result.plain.stats.proposed == []
    for measured in result.measured:
        assert measured.passes[0].tokens == 72
        assert measured.stats.tokens == 144
        assert measured.num_identical == 3
        assert measured.stats.rounds == sum(a.output.stats.rounds for p in measured.passes for a in p.answers)
        for done in measured.passes:
            assert 0 < done.draft_seconds + done.verify_seconds + done.rest_seconds <= done.seconds
            assert 0 < sum(answer.seconds for answer in done.answers) <= done.seconds
            assert [answer.prompt for answer in done.answers] == [0, 1, 2]
    forwards = result.measured[1].stats.rounds
    assert result.forward_speed_up(result.measured[1]).value == pytest.approx(144 / forwards)


def take(result: Comparison, variant: int, seconds: list[list[float]]) -> None:
    """Let a variant's answers have taken so long, by round."""
    for done, row in zip(result.measured[variant].passes, seconds, strict=True):
        done.seconds = sum(row)
        for answer, spent in zip(done.answers, row, strict=True):
            answer.seconds = spent


def test_a_speed_up_is_between_medians_over_rounds(llm: LLM) -> None:
    result = compare(llm, plan(rounds=2))
    take(result, 0, [[1.0, 1.0, 2.0], [2.0, 2.0, 2.0]])
    take(result, 1, [[0.5, 0.5, 1.0], [0.5, 0.5, 1.0]])
    assert result.plain.seconds == 5.0
    assert result.plain.tokens_per_second == pytest.approx((72 / 4 + 72 / 6) / 2)
    found = result.speed_up(result.measured[1])
    assert found.value == pytest.approx(72 / 2 / ((72 / 4 + 72 / 6) / 2))
    assert found.low is not None and found.high is not None
    assert 2.0 <= found.low <= found.value <= found.high <= 4.0  # no answer gained less or more than that
    assert result.speed_up(result.plain).value == 1.0


def test_a_speed_up_is_of_the_rounds_and_prompts_that_both_have(llm: LLM) -> None:
    result = compare(llm, plan(rounds=2))
    take(result, 0, [[1.0, 2.0, 3.0], [100.0, 100.0, 100.0]])
    take(result, 1, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    only = result.measured[1].passes.pop(0)
    only.answers = only.answers[:2]
    result.measured[1].passes = [only]
    assert result.speed_up(result.measured[1]).value == pytest.approx(1.5)


def test_answers_computed_together_share_the_time(model: Any) -> None:
    together = LLM(model, kernels="reference", max_model_len=200, max_num_seqs=3, prefix_caching=False)
    result = compare(together, plan(max_tokens=12))
    for measured in result.measured:
        shares = [answer.seconds for answer in measured.passes[0].answers]
        assert sum(shares) <= measured.passes[0].seconds
    plain = [answer.seconds for answer in result.plain.passes[0].answers]
    assert max(plain) - min(plain) < 1e-9  # equally long, so every round was shared by all three


def test_greedy_drafts_are_accepted_somewhere_so_that_identity_proves_something(llm: LLM) -> None:
    result = compare(llm, plan(max_tokens=60))
    for measured in result.measured[1:]:
        assert sum(measured.stats.accepted) > 0
        assert measured.stats.tokens_per_forward > 1


def planted(result: Comparison, variant: int, prompt: int, position: int, round: int = 0) -> None:
    """Make a variant say another token, as a faulty acceptance would."""
    answer = result.measured[variant].passes[round].answers[prompt]
    answer.output = copy.deepcopy(answer.output)
    answer.output.token_ids[position] = (answer.output.token_ids[position] + 1) % 97


@pytest.mark.parametrize("position", [0, 7, 23])
def test_a_planted_difference_is_found_with_its_place_and_margin(llm: LLM, model: Any, position: int) -> None:
    result = compare(llm, plan(rounds=2))
    planted(result, variant=2, prompt=1, position=position, round=1)
    find_differences(result, llm)
    assert [len(measured.differences) for measured in result.measured] == [0, 0, 1]
    assert [measured.num_identical for measured in result.measured] == [3, 3, 2]
    (found,) = result.measured[2].differences
    expected = result.plain.passes[0].answers[1].output.token_ids
    assert (found.prompt, found.round, found.position) == (1, 1, position)
    assert (found.expected, found.got) == (expected[position], (expected[position] + 1) % 97)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1].ids + expected[:position]])).logits[0, -1]
    top = torch.log_softmax(logits.double(), 0).topk(2).values
    assert found.margin == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_an_interrupt_while_margins_are_recomputed_keeps_those_that_were(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_run, real_margin, asked = bench.run_prompts, differences.find_margin, 0

    def faulty(llm: LLM, plan: Plan, numbers: Any, on_done: Any) -> Pass:
        done = real_run(llm, plan, numbers, on_done)
        for answer in done.answers if llm.engine.drafter is not None else ():
            answer.output = copy.deepcopy(answer.output)
            answer.output.token_ids[4] = (answer.output.token_ids[4] + 1) % 97
        return done

    def interrupted(*given: Any) -> float | None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise KeyboardInterrupt
        return real_margin(*given)

    monkeypatch.setattr(bench, "run_prompts", faulty)
    monkeypatch.setattr(differences, "find_margin", interrupted)
    result = compare(llm, plan(max_tokens=8))
    assert result.interrupted
    assert asked == 2
    assert [len(measured.passes) for measured in result.measured] == [1, 1, 1]
    assert [len(measured.differences) for measured in result.measured] == [0, 3, 3]
    margins = [found.margin for measured in result.measured for found in measured.differences]
    assert margins[0] is not None
    assert margins[1:] == [None] * 5
    assert not llm.engine.has_work


def test_an_answer_that_ends_early_or_late_differs_where_the_other_goes_on(llm: LLM) -> None:
    result = compare(llm, plan())
    short, long, _ = result.measured[1].passes[0].answers
    short.output, long.output = copy.deepcopy(short.output), copy.deepcopy(long.output)
    short.output.token_ids.pop()
    long.output.token_ids.append(3)
    find_differences(result, None)
    last = result.plain.passes[0].answers[0].output.token_ids[-1]
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


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        (0, []),
        (1, [[1]]),
        (2, [[1], [1]]),
        (4, [[1], [1], [2]]),
        (8, [[3], [3], [2]]),
        (9, [[3]] * 3),
        (13, [[3]] * 3),
        (17, [[3], [3, 3], [3, 3]]),
    ],
)
def test_an_interrupt_keeps_complete_passes_and_of_the_first_round_the_answers_that_were_ready(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, answers: int, left: list[list[int]]
) -> None:
    """Plain, ngram, suffix, suffix, ngram, plain, plain, ngram, suffix; the second round the other way round."""
    real, done = bench.run_prompts, -3  # three warm-ups come first

    def limited(*given: Any) -> Any:
        nonlocal done
        if done == answers:
            raise KeyboardInterrupt
        done += 1
        return real(*given)

    monkeypatch.setattr(bench, "run_prompts", limited)
    result = compare(llm, plan(rounds=2, max_tokens=4))
    assert result.interrupted
    assert [[len(done.answers) for done in measured.passes] for measured in result.measured] == left
    for measured in result.measured:
        assert all(done.complete == (len(done.answers) == 3) and done.seconds > 0 for done in measured.passes)
        assert measured.num_identical == len(measured.passes[0].answers)
        assert result.speed_up(measured).value > 0


def test_an_interrupt_within_prompts_answered_together_keeps_those_that_were_ready(model: Any) -> None:
    def tell(variant: str, round: int, done: int) -> None:
        if (variant, round, done) == ("ngram", 0, 1):
            raise KeyboardInterrupt

    llm = LLM(model, kernels="reference", max_model_len=200, max_num_seqs=2, prefix_caching=False)
    result = compare(llm, plan(max_tokens=4), tell)
    assert [len(measured.passes[0].answers) for measured in result.measured] == [3, 1]


def test_variants_have_short_names_and_a_letter_where_two_would_be_the_same() -> None:
    def named(*variants: Variant) -> list[str]:
        return labels([Variant("plain", None), *variants])

    assert named(Variant("ngram:max_match=3", NGram()), DRAFTERS[1]) == ["plain", "ngram", "suffix"]
    both = (Variant("ngram:max_match=3", NGram()), Variant("ngram:max_match=2,min_match=1", NGram()))
    assert named(*both) == ["plain", "ngram a", "ngram b"]
    drafted = Variant("draft:model=some/folder/tiny,num_draft_tokens=5", DraftModel("some/folder/tiny"))
    assert named(drafted) == ["plain", "tiny"]
    assert named(Variant("ngram:num_draft_tokens=3", NGram(3), 3)) == ["plain", "3 drafted"]


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
    with pytest.raises(PacelineError, match="prompt 'third' failed: no token can be sampled"):
        compare(llm, plan(max_tokens=4))
