"""Known bugs, planted: each must make one of the suite's own checks fail, which passes without it.

They are the mistakes that speculative decoders have been shipped with (the design's list of hazards).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.drafters.base import Drawn
from paceline.drafters.draft_model import DraftModel
from paceline.engine import engine
from paceline.engine.context import DraftContext
from paceline.engine.sequence import Sequence
from paceline.kernels.chain import Picking
from paceline.sampling import noise, processors, rules
from paceline.sampling.noise import Keys
from paceline.sampling.state import Rows, SamplerState
from paceline.sampling.verify import Judged
from tests.sampling.noises import check_independent, unit_of, walk_bits
from tests.sampling.pipelines import ALL, check_pipeline
from tests.sampling.spoken import SHAPES, chain_of, check_spoken, check_text, make_llm, speak
from tests.sampling.verdicts import check_same_coins, check_thresholds, check_walk

Patch = pytest.MonkeyPatch


def assert_caught(plant: Callable[[Patch], None], check: Callable[[], object]) -> None:
    check()
    with Patch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            check()


# Noise


def one_noise_for_all_positions(patch: Patch) -> None:
    real, library_picks = noise.row_words, SamplerState.picking

    def stuck(keys: Keys, positions: Tensor, stream: int, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        return real(keys, torch.zeros_like(positions), stream, extra)

    def picking(self: SamplerState, slots: Tensor, positions: Tensor, *more: Any) -> Picking:
        return library_picks(self, slots, torch.zeros_like(positions), *more)

    patch.setattr(noise, "row_words", stuck)
    patch.setattr(SamplerState, "picking", picking)


def accept_stream_is_the_sample_stream(patch: Patch) -> None:
    patch.setattr(noise, "ACCEPT", noise.SAMPLE)


def coins_are_the_noise_of_the_draft(patch: Patch) -> None:
    def coin(judged: Judged, node: int, depth: Tensor) -> Tensor:
        keys = judged.state.keys(judged.root_slots)
        return noise.uniform(keys, judged.root_positions + depth, noise.DRAFT, judged.root_positions + 1)

    patch.setattr(rules, "_coin", coin)


def the_last_token_is_picked_with_the_noise_of_the_draft(patch: Patch) -> None:
    def sample(judged: Judged, probabilities: Tensor, positions: Tensor) -> Tensor:
        keys = judged.state.keys(judged.root_slots)
        size, start = probabilities.shape[1], judged.root_positions + 1
        return rules.argmax(torch.log(probabilities).float() + noise.gumbel(keys, positions, noise.DRAFT, size, start))

    patch.setattr(rules, "_sample", sample)


def one_coin_for_all_nodes(patch: Patch) -> None:
    real = rules._coin
    patch.setattr(rules, "_coin", lambda judged, node, depth: real(judged, 0, torch.ones_like(depth)))


def check_positions() -> None:
    values = unit_of(walk_bits("position"))
    check_independent(values[1:], values[:-1])


def check_engine(acceptance: str) -> None:
    check_text(speak(make_llm(acceptance, None), 1.5)[0], chain_of(1.5))


def test_one_noise_for_all_positions_is_caught_by_correlation_and_by_the_engines_texts() -> None:
    assert_caught(one_noise_for_all_positions, check_positions)
    assert_caught(one_noise_for_all_positions, partial(check_engine, "exact"))


def test_an_accept_stream_that_is_the_sample_stream_is_caught_by_the_stated_coins() -> None:
    assert_caught(accept_stream_is_the_sample_stream, partial(check_same_coins, "rejection", 0, False, True))
    assert_caught(accept_stream_is_the_sample_stream, partial(check_same_coins, "block", 0, True, True))


def test_coins_shared_with_the_draft_are_caught_by_the_distribution() -> None:
    assert_caught(coins_are_the_noise_of_the_draft, partial(check_spoken, SHAPES["siblings"], "rejection"))


def test_a_last_token_that_shares_the_drafts_noise_is_caught_by_the_distribution() -> None:
    plant = the_last_token_is_picked_with_the_noise_of_the_draft
    assert_caught(plant, partial(check_spoken, SHAPES["chain"], "rejection"))


def test_one_coin_for_all_nodes_is_caught_by_the_stated_coins_and_in_block_by_the_distribution() -> None:
    """Among siblings it does not show in 20000 samples of `rejection`; the statement shows it there."""
    assert_caught(one_coin_for_all_nodes, partial(check_same_coins, "rejection", 0, False, True))
    assert_caught(one_coin_for_all_nodes, partial(check_spoken, SHAPES["chain"], "block"))


# Rules


def the_residual_is_p(patch: Patch) -> None:
    patch.setattr(rules, "_residual", lambda p, q: p)


def children_are_tried_in_the_wrong_order(patch: Patch) -> None:
    real = DraftContext._append

    def append(self: DraftContext, picked: Tensor, parents: Tensor, path: Tensor) -> Drawn:
        return real(self, picked.flip(2), parents, path)

    patch.setattr(DraftContext, "_append", append)


def the_likeliest_draft_is_judged_as_if_drawn(patch: Patch) -> None:
    patch.setattr(DraftContext, "_pick", lambda self, processed, rows, lengths, chosen: processed.argmax(1))


def scratch_nodes_may_be_accepted(patch: Patch) -> None:
    patch.setattr(Judged, "children", lambda self, node, current: self.proposal.parents[:, node] + 1 == current)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_residual_of_p_is_caught_by_statement_and_by_distribution(acceptance: str) -> None:
    assert_caught(the_residual_is_p, partial(check_thresholds, acceptance, 0, True, True))
    assert_caught(the_residual_is_p, partial(check_spoken, SHAPES["chain"], acceptance))


def test_a_wrong_child_order_is_caught_by_the_distribution() -> None:
    assert_caught(children_are_tried_in_the_wrong_order, partial(check_spoken, SHAPES["siblings"], "rejection"))


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_argmax_drafts_judged_with_softmax_probabilities_are_caught(acceptance: str) -> None:
    assert_caught(the_likeliest_draft_is_judged_as_if_drawn, partial(check_spoken, SHAPES["chain"], acceptance))


def test_accepted_scratch_nodes_are_caught_by_the_walk() -> None:
    assert_caught(scratch_nodes_may_be_accepted, partial(check_walk, 0, scratch=True))


# Processors


def penalties_ignore_the_draft(patch: Patch) -> None:
    real = processors._counts

    def stale(rows: Rows, state: SamplerState, vocab_size: int) -> tuple[Tensor, Tensor]:
        depth = (rows.drafted >= 0).sum(1)
        return real(replace(rows, drafted=rows.drafted[:, :0], positions=rows.positions - depth), state, vocab_size)

    patch.setattr(processors, "_counts", stale)


def bad_words_ignore_the_draft(patch: Patch) -> None:
    real = processors._tail

    def stale(rows: Rows, state: SamplerState, count: int) -> Tensor:
        depth = (rows.drafted >= 0).sum(1)
        return real(replace(rows, drafted=rows.drafted[:, :0], positions=rows.positions - depth), state, count)

    patch.setattr(processors, "_tail", stale)


def swap_stages(one: int, other: int, patch: Patch) -> None:
    stages = list(processors.STAGES)
    stages[one], stages[other] = stages[other], stages[one]
    patch.setattr(processors, "STAGES", tuple(stages))


def many_pipelines(stages: list[str]) -> None:
    for seed in range(6):
        check_pipeline(seed, set(stages))


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_stale_penalties_are_caught(penalty: str) -> None:
    assert_caught(penalties_ignore_the_draft, partial(many_pipelines, [penalty]))


def test_bad_words_that_end_at_the_draft_are_caught() -> None:
    assert_caught(bad_words_ignore_the_draft, partial(many_pipelines, ["bad_words"]))


@pytest.mark.parametrize("one, other", [(4, 5), (5, 6), (6, 8), (7, 8)])
def test_two_stages_in_the_wrong_order_are_caught(one: int, other: int) -> None:
    """From the penalties on: before them stages only ban and add, which commute; so do min-p (6) and top-k (7)."""
    assert_caught(partial(swap_stages, one, other), partial(many_pipelines, [*ALL[:7], "logit_bias"]))


# The engine


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generated(drafter: Any, params: SamplingParams) -> Any:
    llm = LLM(tiny(0), drafter, kernels="reference", max_model_len=64)
    return llm.generate([5, 6, 7, 8], params)[0].outputs[0]


def check_stops() -> None:
    """The drafter is the target itself, so whole runs are accepted; a stop token inside one ends the text there."""
    plain = generated(None, SamplingParams(1.0, max_tokens=12, seed=4, ignore_eos=True)).token_ids
    inside = next(place for place in (3, 2, 4) if plain.index(plain[place]) == place)  # not at the end of a run of 6
    params = SamplingParams(1.0, max_tokens=12, seed=4, ignore_eos=True, stop_token_ids=[plain[inside]])
    found = generated(DraftModel(tiny(0), 5), params)
    assert found.finish_reason == "stop"
    assert found.token_ids == plain[: inside + 1]
    assert len(found.provenance) == inside + 1


def tokens_after_a_stop_are_kept(patch: Patch) -> None:
    real = engine.append_tokens

    def careless(sequence: Sequence, tokens: list[int]) -> list[int]:
        rest = tokens[len(real(sequence, tokens)) :]
        sequence.tokens += rest
        return tokens

    patch.setattr(engine, "append_tokens", careless)


def test_tokens_kept_after_a_stop_inside_an_accepted_run_are_caught() -> None:
    assert_caught(tokens_after_a_stop_are_kept, check_stops)


def the_drafts_noise_is_one_position_late(patch: Patch) -> None:
    real = DraftContext._pick

    def late(self: DraftContext, processed: Tensor, rows: Rows, lengths: Tensor, chosen: bool) -> Tensor:
        return real(self, processed, replace(rows, positions=rows.positions + 1), lengths, chosen)

    patch.setattr(DraftContext, "_pick", late)


SAMPLED = SamplingParams(1.0, max_tokens=16, seed=11, ignore_eos=True)


def check_acceptance_of_oneself() -> None:
    """A drafter that is the target, with the target's noise, is never refused."""
    stats = generated(DraftModel(tiny(0), 3), SAMPLED).stats
    assert sum(stats.proposed) > 0 and stats.acceptance == 1.0


def test_draft_noise_one_position_late_is_caught_by_acceptance_alone() -> None:
    plain = generated(None, SAMPLED).token_ids
    assert_caught(the_drafts_noise_is_one_position_late, check_acceptance_of_oneself)
    with Patch.context() as patch:
        the_drafts_noise_is_one_position_late(patch)
        assert generated(DraftModel(tiny(0), 3), SAMPLED).token_ids == plain


def test_penalties_that_ignore_the_draft_change_the_engines_text() -> None:
    params = replace(SAMPLED, frequency_penalty=2.0, repetition_penalty=1.8, temperature=0.4)

    def check() -> None:
        assert generated(DraftModel(tiny(0), 3), params).token_ids == plain

    plain = generated(None, params).token_ids
    assert_caught(penalties_ignore_the_draft, check)
