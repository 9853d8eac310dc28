"""Proposals at their edges: nodes beyond a sequence's budget, beyond the tables' width, beyond every tree's size."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import DraftModel, FirstOf, NGram, SamplingParams
from tests.fakes import VOCAB, tiny_llm, tiny_model


@pytest.mark.parametrize("wish", [{"bad_words": [[3, 4, 5]]}, {"repetition_penalty": 1.3}, {"min_tokens": 5}])
def test_a_sequence_near_the_limit_beside_one_far_from_it_may_use_every_processor(wish: dict[str, Any]) -> None:
    """A draft model draws for both as long as one has budget; the full one's nodes lie beyond the tables."""
    prompts = [[7 * i % VOCAB for i in range(61)], [1, 2, 3]]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **wish)
    drafted = tiny_llm(DraftModel(tiny_model(), 5), max_model_len=64).generate(prompts, params)
    plain = tiny_llm(max_model_len=64).generate(prompts, params)
    assert [item.outputs[0].token_ids for item in drafted] == [item.outputs[0].token_ids for item in plain]
    assert len(plain[0].outputs[0].token_ids) == 3 and len(plain[1].outputs[0].token_ids) == 40


REFERENCE = NGram(6, rule="reference")


@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block", "typical"])
@pytest.mark.parametrize("drafter", [REFERENCE, FirstOf(REFERENCE, NGram(2, max_match=1))], ids=["alone", "first of"])
def test_a_proposal_wider_than_its_sizes_is_judged_under_every_rule(
    drafter: Any, acceptance: str, temperature: float
) -> None:
    """The reference rule proposes tensors as wide as its largest count, whatever it found."""
    llm = tiny_llm(drafter, acceptance=acceptance)
    bias = dict.fromkeys((3, 4, 5), 6.0)  # a text that repeats itself
    params = SamplingParams(temperature, max_tokens=40, seed=3, ignore_eos=True, logit_bias=bias)
    prompts = [[3, 4, 5] * 4, [9, 3, 4], [5]]
    outputs = [item.outputs[0] for item in llm.generate(prompts, params)]
    assert [len(output.token_ids) for output in outputs] == [40] * 3
    assert sum(sum(output.stats.accepted) for output in outputs) > 0
    if temperature == 0.0:
        plain = tiny_llm().generate(prompts, params)
        assert [item.outputs[0].token_ids for item in plain] == [output.token_ids for output in outputs]
