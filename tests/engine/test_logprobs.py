"""Log-probabilities of answers, prompts and given texts, against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline import SamplingParams
from paceline.errors import EngineError
from tests.engine.asking import BEHIND, LONG, PROMPT, Watched, run
from tests.fakes import tiny_llm, tiny_model


def raw_logprobs(ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(tiny_model()(torch.tensor([ids])).logits[0].double(), dim=1)


def assert_logprobs(entries: list[Any], ids: list[int], start: int, count: int) -> None:
    truth = raw_logprobs(ids)
    for place, entry in enumerate(entries, start=start):
        row, token = truth[place - 1], ids[place]
        assert count <= len(entry) <= count + 1 and token in entry
        best = row.topk(count).indices.tolist()
        assert set(entry) == {*best, token}
        for other, told in entry.items():
            assert abs(told.logprob - float(row[other])) <= 1e-4
            assert told.rank == 1 + int((row > row[other]).sum())


@BEHIND
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_model_whatever_the_sampling(behind: int | None, count: int) -> None:
    drafter = Watched([PROMPT], 3, temperature=1.4, seed=3, top_k=20)
    output = run(tiny_llm(drafter, behind), PROMPT, temperature=1.4, seed=3, top_k=20, max_tokens=9, logprobs=count)
    assert output.token_ids == drafter.recorded[tuple(PROMPT)][len(PROMPT) :][:9] and sum(output.stats.accepted) > 4
    assert output.logprobs is not None and len(output.logprobs) == 9
    assert_logprobs(output.logprobs, [*PROMPT, *output.token_ids], len(PROMPT), count)
    assert output.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids))
    )


@BEHIND
def test_prompt_logprobs_are_right_in_chunks_and_pass_by_the_prefix_cache(behind: int | None) -> None:
    llm = tiny_llm(behind=behind, max_batched_tokens=16)
    run(llm, LONG, max_tokens=1)
    assert run(llm, LONG, max_tokens=1).stats.prefix_hit == 32
    result = llm.generate([LONG], SamplingParams(max_tokens=2, prompt_logprobs=3))[0]
    assert result.outputs[0].stats.prefix_hit == 0
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(LONG)
    assert result.prompt_logprobs[0] is None
    assert_logprobs(result.prompt_logprobs[1:], LONG, 1, 3)
    assert llm.generate([LONG], SamplingParams(max_tokens=1))[0].prompt_logprobs is None


@BEHIND
def test_an_update_tells_the_prompts_logprobs_once_and_whole(behind: int | None) -> None:
    llm = tiny_llm(behind=behind, max_batched_tokens=16)
    llm.add(LONG, SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=3))
    updates = [update for _ in range(20) for update in llm.step()]
    told = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    assert len(told) == 1 and updates[-1].finished
    assert told[0][0] is None and len(told[0]) == len(LONG)
    assert_logprobs(told[0][1:], LONG, 1, 3)


@BEHIND
def test_a_score_is_the_log_probability_of_every_token_but_the_first(behind: int | None) -> None:
    llm = tiny_llm(behind=behind)
    long, short = llm.score([LONG, PROMPT[:1]])
    truth = raw_logprobs(LONG)
    assert long.token_ids == LONG
    assert long.logprobs == pytest.approx([float(truth[place - 1, LONG[place]]) for place in range(1, len(LONG))], 1e-4)
    assert long.total == pytest.approx(sum(long.logprobs))
    assert long.perplexity == pytest.approx(math.exp(-long.total / (len(LONG) - 1)))
    assert short.logprobs == [] and short.total == 0.0 and math.isnan(short.perplexity)


def test_a_text_that_was_not_scored_to_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(max_batched_tokens=16)
    real = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (llm.abort(next(iter(llm._live))), real())[1])
    with pytest.raises(EngineError, match="the text was not scored: it ended with 'abort'"):
        llm.score([LONG])
