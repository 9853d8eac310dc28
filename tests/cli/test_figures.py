"""Figures of an answer against the engine's own counts, and the arithmetic on rounds made up by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.cli.figures import ENOUGH_ROUNDS, PROBE_TOKENS, WARM_UP, Figures, PlainCost, latest, measure_plain
from paceline.engine.sequence import Provenance
from paceline.engine.stats import RoundRecord
from paceline.outputs import Chunk
from tests.cli.checkpoints import make_model, make_tokenizer
from tests.fakes import Oracle


def record(rows: int, proposed: int, accepted: int, emitted: int, seconds: float = 0.0) -> RoundRecord:
    return RoundRecord(rows, 1, 10, proposed, accepted, emitted, 5.0, seconds, seconds)


def chunk(*kinds: str) -> Chunk:
    told = [Provenance("ngram" if kind == "accepted" else None, kind, 0, 1) for kind in kinds]
    return Chunk(0, "", list(range(len(kinds))), told)


@pytest.fixture
def llm() -> LLM:
    tokenizer = make_tokenizer()
    return LLM(make_model(len(tokenizer)), tokenizer=tokenizer, kernels="reference", max_model_len=200)


def test_plain_decoding_costs_what_the_latest_run_of_it_did() -> None:
    cost = PlainCost()
    assert cost.seconds is None
    cost.learn([record(40, 0, 0, 1, 9.0), record(6, 5, 2, 3, 9.0)] * ENOUGH_ROUNDS)  # prompts and drafts: not plain
    assert cost.seconds is None
    cost.learn([record(1, 0, 0, 1, seconds) for seconds in [7.0, *[1.0, 3.0, 2.0] * 6]])
    assert cost.seconds == 4.0  # verifying and the rest, and no time of a drafter's
    cost.learn([record(1, 0, 0, 1, 5.0)] * ENOUGH_ROUNDS)
    assert cost.seconds == 10.0


def test_the_cost_of_plain_decoding_does_not_drift_with_the_slow_first_rounds_of_many_answers() -> None:
    cost = PlainCost()
    cost.learn([record(1, 0, 0, 1, 0.5)] * 20)
    for _ in range(50):
        cost.learn([record(30, 0, 0, 1, 4.0), *[record(1, 0, 0, 1, 4.0)] * 3, *[record(6, 5, 5, 6, 1.0)] * 30])
    assert cost.seconds == 1.0


def test_a_total_stands_against_what_plain_decoding_cost_at_each_time() -> None:
    total, cost = Figures(), PlainCost()
    for seconds, took in ((0.5, 4.0), (2.0, 16.0)):  # the machine became four times slower
        cost.learn([record(1, 0, 0, 1, seconds)] * ENOUGH_ROUNDS)
        part = Figures()
        part.add(chunk("plain"), 1.0)
        part.add(chunk(*["accepted"] * 8), 1.0 + took)
        part.close([], 3, cost)
        assert part.times_plain(cost) == 2.0
        total.include(part)
    assert total.times_plain(cost) == 2.0


def test_the_probe_is_plain_and_short(llm: LLM) -> None:
    cost = measure_plain(llm)
    assert cost.seconds is not None and cost.seconds > 0
    records = latest(llm, llm.engine.stats.rounds)
    assert len(records) <= PROBE_TOKENS
    assert all(record.proposed == 0 for record in records)
    assert len(records) > WARM_UP
    assert llm.engine.has_work is False


def test_figures_are_the_engine_s_own_counts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=60, ignore_eos=True)
    ids = llm.tokenizer.encode("the rider in front and the rider in front and the rider behind at the front")
    plain = llm.generate([ids], params)[0].outputs[0].token_ids
    llm = LLM(make_model(len(llm.tokenizer)), tokenizer=llm.tokenizer, kernels="reference", max_model_len=200)
    llm.set_drafter(Oracle({tuple(ids): [*ids, *plain]}, 3))
    for turn in range(2):
        figures, before, output = Figures(), llm.engine.stats.rounds, None
        for piece in llm.stream({"prompt_token_ids": ids}, params):
            figures.add(piece, 1.0)
            output = piece.output
        assert output is not None
        figures.close(latest(llm, llm.engine.stats.rounds - before), len(ids), PlainCost())
        assert (figures.tokens, figures.forwards) == (60, output.stats.rounds)
        assert figures.per_forward == pytest.approx(output.stats.tokens_per_forward)
        assert figures.origins == Counter(told.drafter or told.kind for told in output.provenance)
        assert (figures.proposed, figures.accepted) == (sum(output.stats.proposed), sum(output.stats.accepted))
        assert figures.accepted > 40
        assert figures.reused == output.stats.prefix_hit == turn * 16


def test_speed_counts_from_the_first_token_on() -> None:
    figures, plain = Figures(), PlainCost()
    plain.learn([record(1, 0, 0, 1, 0.5)], least=1)  # 1 s a token
    figures.add(chunk(), 3.0)  # a part of the prompt
    figures.add(chunk("plain"), 4.0)
    assert figures.speed is None
    figures.add(chunk("accepted", "accepted", "bonus"), 5.0)
    figures.add(chunk("accepted", "corrected"), 6.5)
    assert (figures.tokens, figures.forwards) == (6, 3)
    assert (figures.wait, figures.seconds, figures.timed_tokens) == (4.0, 2.5, 5)
    assert figures.times_plain(plain) == figures.speed == 2.0
    assert figures.line(plain, True) == "6 tokens · 2.0 tokens/s · 2.00 per forward · ≈ 2.0× plain"
    assert figures.line(plain, False) == "6 tokens · 2.0 tokens/s · 2.00 per forward · plain"
    assert figures.origins == {"ngram": 3, "bonus": 1, "corrected": 1, "plain": 1}


def test_a_total_is_the_sum_of_its_answers() -> None:
    total = Figures()
    for elapsed in (1.0, 3.0):
        part = Figures()
        part.add(chunk("plain"), elapsed)
        part.add(chunk("accepted", "bonus", "plain", "plain"), elapsed + 2.0)
        part.close([record(20, 0, 0, 1), record(3, 2, 1, 4)], 30, PlainCost())
        total.include(part)
    assert (total.tokens, total.forwards, total.timed_tokens, total.seconds, total.wait) == (10, 4, 8, 4.0, 4.0)
    assert (total.proposed, total.accepted, total.prompt_tokens, total.reused) == (4, 2, 60, 20)
    said = "\n".join(total.report(PlainCost()))
    for words in (
        "10 tokens in 4 target forwards, 2.50 per forward",
        "2.0 tokens/s",
        "2 of 4 drafted tokens",
        "60 tokens",
    ):
        assert words in said


def test_a_line_of_large_figures_fits_eighty_columns() -> None:
    figures: Any = Figures(tokens=99999, forwards=9999, timed_tokens=99998, seconds=100.0)
    plain = PlainCost()
    plain.learn([record(1, 0, 0, 1, 0.01)], least=1)
    assert len(figures.line(plain, True) + " · cut short") <= 80
