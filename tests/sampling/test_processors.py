"""The sampling pipeline against a slow statement of it: one row at a time, on the row's token history as a list."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.params import SamplingParams
from paceline.sampling.processors import LIKELY, _nuclei, _nucleus, process
from paceline.sampling.state import SamplerState, Words
from tests.sampling.checks import CPU, Case, make_rows, make_state, one_row, same_bits
from tests.sampling.pipelines import (
    ALL,
    NEVER,
    VOCAB,
    check_pipeline,
    random_case,
    random_logits,
    random_params,
)


@pytest.mark.parametrize("stage", ALL)
def test_each_stage_alone_equals_its_statement(stage: str) -> None:
    for seed in range(6):
        check_pipeline(seed, {stage})


def test_all_stages_together_equal_the_statement() -> None:
    for seed in range(25):
        check_pipeline(100 + seed, set(ALL))


def test_random_subsets_of_stages_equal_the_statement() -> None:
    for seed in range(25):
        chosen = np.random.default_rng(200 + seed).random(len(ALL)) < 0.5
        check_pipeline(200 + seed, {name for name, wanted in zip(ALL, chosen) if wanted} | {"temperature"})


def mixed_batch(seed: int) -> tuple[list[Case], Tensor]:
    """64 rows or more, every slot with stages of its own, some slots with none, some greedy."""
    draws = np.random.default_rng(seed)
    cases: list[Case] = []
    while sum(1 + len(case.tokens) for case in cases) < 64:
        chosen = draws.random(len(ALL)) < draws.choice([0.0, 0.4, 1.0])
        cases.append(random_case(draws, {name for name, wanted in zip(ALL, chosen) if wanted}))
        if len(cases) % 5 == 0:
            cases[-1].params, cases[-1].words = SamplingParams(temperature=0.0, frequency_penalty=0.5), Words([], [1])
    return cases, random_logits(draws, sum(1 + len(case.tokens) for case in cases))


@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_bit_identical_alone_and_among_64(seed: int) -> None:
    cases, logits = mixed_batch(seed)
    rows, places = make_rows(cases)
    state = make_state(cases, VOCAB)
    found = process(logits, rows, state)
    for row in range(len(places)):
        alone = process(logits[row : row + 1], one_row(rows, row), state)
        assert same_bits(found[row], alone[0]), (row, cases[places[row][0]].params)


@pytest.mark.parametrize("stage", ALL)
def test_slots_that_do_not_ask_for_a_stage_keep_their_bits(stage: str) -> None:
    draws = np.random.default_rng(7)
    cases = [random_case(draws, {stage} if slot % 2 else set()) for slot in range(12)]
    rows, places = make_rows(cases)
    logits = random_logits(draws, len(places))
    logits[:, 3], logits[:, 5], logits[:, 6] = -0.0, NEVER, 0.0
    found = process(logits, rows, make_state(cases, VOCAB))
    for row, (slot, _) in enumerate(places):
        if slot % 2 == 0:
            assert same_bits(found[row], logits[row])


def test_a_slot_nobody_has_leaves_its_row_as_it_is_in_any_company() -> None:
    """Rows that only fill a batch up stand in such a slot."""
    draws = np.random.default_rng(8)
    cases = [random_case(draws, set(ALL)) for _ in range(6)]
    rows, places = make_rows(cases)
    state = make_state([*cases, Case([1])], VOCAB)
    fresh = SamplerState(state.table, VOCAB, CPU)
    for slot, case in enumerate(cases):
        fresh.set(slot, case.params, case.words, case.seed, case.sample)
    padded = replace(rows, slots=torch.cat([rows.slots, torch.tensor([len(cases)])]))
    padded.positions = torch.cat([rows.positions, torch.zeros(1, dtype=torch.int64)])
    padded.drafted = torch.cat([rows.drafted, torch.full((1, rows.drafted.shape[1]), -1)])
    logits = random_logits(draws, len(places) + 1)
    assert same_bits(process(logits, padded, fresh)[-1], logits[-1])


def test_the_input_is_left_as_it_is() -> None:
    cases, logits = mixed_batch(9)
    before = logits.clone()
    process(logits, make_rows(cases)[0], make_state(cases, VOCAB))
    assert same_bits(before, logits)


def test_a_slot_that_changes_hands_keeps_nothing_of_the_request_before() -> None:
    old = Case(
        [1], params=SamplingParams(logit_bias={2: 9.0}, top_k=1, min_p=0.2, repetition_penalty=2.0, min_tokens=3)
    )
    old.words = Words([[4]], [5])
    new, other = Case([1]), Case([1], params=random_params(np.random.default_rng(0), set(ALL)))
    state = make_state([old, other], VOCAB)
    state.set(0, new.params, new.words, 0, 0)
    logits = random_logits(np.random.default_rng(1), 2)
    assert same_bits(process(logits, make_rows([new, other])[0], state)[0], logits[0])


# Single rules, on numbers one can check by eye


def processed(logits: list[float], case: Case) -> list[float]:
    """The last node's row (the root's, if there are none)."""
    rows, _ = make_rows([case])
    batch = torch.tensor([logits] * (1 + len(case.tokens)))
    return process(batch, rows, make_state([case], len(logits)))[-1].tolist()


def test_penalties_count_drafted_tokens_on_the_nodes_own_path_only() -> None:
    """Root → 1 → 1, and a sibling 2: the deep node has seen 1 three times, and 2 never."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    case = Case([0], [1], params, tokens=[2, 1, 1], parents=[-1, -1, 1])
    assert processed([0.0, 0.0, 0.0, 0.0], case) == [0.0, -1.75, 0.0, 0.0]


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    case = Case([0, 1], [2], SamplingParams(repetition_penalty=2.0, presence_penalty=1.0))
    assert processed([4.0, -4.0, 4.0, 4.0], case) == [2.0, -8.0, 1.0, 4.0]


def test_a_bad_word_may_begin_in_the_committed_text_and_go_on_in_the_draft() -> None:
    words = Words([[5, 6, 7, 3], [6, 7, 2], [7, 1], [5, 7, 0]], [])
    case = Case([5], [6], SamplingParams(bad_words=[[0]]), words, tokens=[7], parents=[-1])
    assert processed([0.0] * 8, case) == [0.0, NEVER, NEVER, NEVER, 0.0, 0.0, 0.0, 0.0]


def test_a_bad_word_of_one_token_is_banned_everywhere() -> None:
    case = Case([5], params=SamplingParams(bad_words=[[2]]), words=Words([[2], [2]], []))
    assert processed([0.0] * 4, case) == [0.0, 0.0, NEVER, 0.0]


def test_min_tokens_counts_drafted_tokens() -> None:
    params, words = SamplingParams(min_tokens=3), Words([], [1])
    short = Case([0], [2], params, words, tokens=[2], parents=[-1])
    enough = Case([0], [2], params, words, tokens=[2, 2], parents=[-1, 0])
    assert processed([0.0] * 3, short) == [0.0, NEVER, 0.0]
    assert processed([0.0] * 3, enough) == [0.0, 0.0, 0.0]


def test_top_k_keeps_tokens_tied_with_the_last_one() -> None:
    case = Case([0], params=SamplingParams(top_k=2))
    assert processed([1.0, 3.0, 2.0, 2.0, 2.0], case) == [NEVER, 3.0, 2.0, 2.0, 2.0]


def test_top_p_keeps_at_least_one_and_takes_ties_by_lowest_id() -> None:
    assert processed([0.0] * 4, Case([0], params=SamplingParams(top_p=0.5))) == [0.0, 0.0, NEVER, NEVER]
    assert processed([0.0] * 4, Case([0], params=SamplingParams(top_p=1e-30))) == [0.0, NEVER, NEVER, NEVER]
    assert processed([9.0, 0.0], Case([0], params=SamplingParams(top_p=0.5))) == [9.0, NEVER]


def test_min_p_keeps_what_reaches_exactly_the_share() -> None:
    case = Case([0], params=SamplingParams(min_p=1.0))
    assert processed([1.0, 3.0, 3.0, 2.0], case) == [NEVER, 3.0, 3.0, NEVER]


def test_bias_does_not_bring_back_a_token_that_is_not_allowed() -> None:
    case = Case([0], params=SamplingParams(allowed_token_ids=[1, 2], logit_bias={0: 50.0, 1: 1.0}))
    assert processed([0.0, 0.0, 0.0], case) == [NEVER, 1.0, 0.0]


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 9.0])
def test_top_p_of_one_row_sorts_only_the_likeliest_and_keeps_what_sorting_all_keeps(spread: float) -> None:
    """Flat rows need all of the vocabulary, steep ones a few tokens; rounded logits make ties."""
    draws = torch.Generator().manual_seed(4)
    for rounded in (False, True):
        logits = torch.randn(24, 4 * LIKELY + 3, generator=draws) * spread
        logits = logits.round() if rounded else logits
        logits[0, 5:40] = NEVER
        logits[1] = NEVER
        logits[2, 7] = float("nan")
        limit = torch.rand(24, generator=draws).clamp(1e-4)
        limit[3] = 1.0
        share = torch.softmax(logits, dim=1).double()
        found = torch.stack([_nucleus(*row) for row in zip(logits, share, limit.tolist())])
        torch.testing.assert_close(found, _nuclei(logits, share, limit), rtol=0, atol=0, equal_nan=True)
    kept = (found > NEVER).sum(1)
    assert kept.max() > LIKELY or spread > 1
    assert kept[4:].min() < LIKELY


def test_min_p_comes_before_top_k_and_top_k_before_top_p() -> None:
    """Shares .4 .3 .2 .1: top_k=3 leaves .44 .33 .22, of which top_p=.72 keeps two; top_p first would keep three."""
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    found = processed(logits, Case([0], params=SamplingParams(top_k=3, top_p=0.72)))
    assert [value > NEVER for value in found] == [True, True, False, False]
    hot = processed(logits, Case([0], params=SamplingParams(min_p=0.6, temperature=2.0)))
    assert [value > NEVER for value in hot] == [True, True, True, False]  # before the temperature it would keep two


def greedy_among_sampled(params: SamplingParams) -> tuple[Tensor, Tensor]:
    cases = [Case([0], params=params), Case([0], params=SamplingParams(top_k=2, top_p=0.5, min_p=0.5))]
    logits = random_logits(np.random.default_rng(3), 2)
    return process(logits, make_rows(cases)[0], make_state(cases, VOCAB)), logits


def test_a_greedy_slot_keeps_its_likeliest_token_among_sampled_ones() -> None:
    found, logits = greedy_among_sampled(SamplingParams(temperature=0.0, top_k=3, top_p=0.4, min_p=0.3))
    assert int(found[0].argmax()) == int(logits[0].argmax())


def test_a_greedy_slots_unused_limits_leave_its_row_alone_in_any_company() -> None:
    """Greedy slots do not ask for min-p, top-k or top-p, so no neighbour may turn those on for them."""
    found, logits = greedy_among_sampled(SamplingParams(temperature=0.0, top_k=3, top_p=0.4, min_p=0.3))
    assert same_bits(found[0], logits[0])
