"""The sampling pipeline against a slow statement of it: one row at a time, on the row's token history as a list."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.params import SamplingParams
from paceline.sampling.processors import LIKELY, _nuclei, _nucleus, process
from paceline.sampling.state import Words
from tests.sampling.checks import Case, make_rows, make_state, one_row, random_tree, same_bits

VOCAB = 23
NEVER = -math.inf
EDGE = 1e-5  # a share this near to top_p or min_p may fall on either side: float32 sums of at most 23 terms


class TooClose(Exception):
    """The statement cannot say on which side of a limit a token falls in float32."""


def stated(logits: list[np.float32], case: Case, drafted: list[int]) -> list[np.float32]:
    """The design's pipeline in its order; float32 up to the temperature, then exact sets of kept tokens."""
    params, prompt, output = case.params, case.prompt, [*case.output, *drafted]
    row = stated_masks(logits, case, prompt + output, len(output))
    for token in range(len(row)):
        if token in prompt + output:
            factor = np.float32(params.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(params.presence_penalty) * np.float32(token in output)
    if params.temperature <= 1e-6:
        return row
    row = [value / np.float32(params.temperature) for value in row]
    for keep in (kept_by_min_p, kept_by_top_k, kept_by_top_p):
        kept = keep([float(value) for value in row], params)
        row = [value if token in kept else np.float32(NEVER) for token, value in enumerate(row)]
    return row


def stated_masks(logits: list[np.float32], case: Case, history: list[int], produced: int) -> list[np.float32]:
    params = case.params
    banned = {word[-1] for word in case.words.bad if _ends(history, word[:-1])}
    if produced < params.min_tokens:
        banned |= set(case.words.stops)
    if params.allowed_token_ids is not None:
        banned |= set(range(len(logits))) - set(params.allowed_token_ids)
    bias = params.logit_bias or {}
    raised = [value + np.float32(bias[token]) if token in bias else value for token, value in enumerate(logits)]
    return [np.float32(NEVER) if token in banned else value for token, value in enumerate(raised)]


def _ends(history: list[int], head: list[int]) -> bool:
    return len(history) >= len(head) and history[len(history) - len(head) :] == head


def kept_by_min_p(row: list[float], params: SamplingParams) -> set[int]:
    shares = [math.exp(value - max(row)) for value in row]
    if params.min_p > 0 and any(abs(share - params.min_p) < EDGE * params.min_p for share in shares):
        raise TooClose
    return {token for token, share in enumerate(shares) if share >= params.min_p}


def kept_by_top_k(row: list[float], params: SamplingParams) -> set[int]:
    if params.top_k <= 0:
        return set(range(len(row)))
    return {token for token, value in enumerate(row) if sum(other > value for other in row) < params.top_k}


def kept_by_top_p(row: list[float], params: SamplingParams) -> set[int]:
    if params.top_p >= 1:
        return set(range(len(row)))
    weights = [math.exp(value - max(row)) for value in row]
    kept, before = set(), 0.0
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if kept and weights[token] and abs(before - params.top_p) < EDGE:
            raise TooClose
        if kept and before >= params.top_p:
            break
        kept.add(token)
        before += weights[token] / sum(weights)
    return kept


def random_params(draws: np.random.Generator, stages: set[str]) -> SamplingParams:
    """Every stage of `stages` set to something that bites."""
    some = {
        "temperature": float(draws.uniform(0.3, 2.0)),
        "min_p": float(draws.uniform(0.01, 0.3)),
        "top_k": int(draws.integers(1, VOCAB + 5)),
        "top_p": float(draws.uniform(0.05, 0.99)),
        "presence_penalty": float(draws.uniform(-2, 2)),
        "frequency_penalty": float(draws.uniform(-2, 2)),
        "repetition_penalty": float(draws.uniform(0.5, 2)),
        "logit_bias": {int(token): float(draws.uniform(-5, 5)) for token in draws.integers(0, VOCAB, 4)},
        "allowed_token_ids": sorted({int(token) for token in draws.integers(0, VOCAB, 15)}),
        "min_tokens": int(draws.integers(1, 8)),
        "bad_words": [[0]],  # what is banned stands in Words; this only asks for the stage
    }
    chosen = {name: value for name, value in some.items() if name in stages}
    return SamplingParams(max_tokens=20, **chosen)  # type: ignore[arg-type]


PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty"]
MASKS = ["logit_bias", "allowed_token_ids", "min_tokens", "bad_words"]
ALL = ["temperature", "min_p", "top_k", "top_p", *PENALTIES, *MASKS]


def random_case(draws: np.random.Generator, stages: set[str]) -> Case:
    prompt = draws.integers(0, VOCAB, int(draws.integers(1, 8))).tolist()
    output = draws.integers(0, VOCAB, int(draws.integers(0, 8))).tolist()
    tokens, parents = random_tree(draws, int(draws.integers(0, 7)), VOCAB)
    case = Case(prompt, output, random_params(draws, stages), tokens=tokens, parents=parents)
    bad: list[list[int]] = []
    for _ in range(4 if "bad_words" in stages else 0):  # words that some row's history is about to complete
        node = int(draws.integers(-1, len(tokens)))
        history = [*prompt, *output, *case.drafted(node)]
        length = int(draws.integers(0, min(len(history), 5) + 1))
        bad.append([*history[len(history) - length :], int(draws.integers(0, VOCAB))])
    if bad:
        bad.append([VOCAB - 1] * 30)  # longer than any history
    case.words = Words(bad, draws.integers(0, VOCAB, 3).tolist())
    return case


def random_logits(draws: np.random.Generator, rows: int) -> Tensor:
    return torch.from_numpy(draws.normal(0, 2, (rows, VOCAB)).astype(np.float32))


def check_pipeline(seed: int, stages: set[str], least: int = 1) -> int:
    """A batch of random slots and trees: every row equals the statement on its own history. Returns changed rows."""
    draws = np.random.default_rng(seed)
    cases = [random_case(draws, stages) for _ in range(10)]
    rows, places = make_rows(cases)
    logits = random_logits(draws, len(places))
    found = process(logits, rows, make_state(cases, VOCAB))
    changed = skipped = 0
    for row, (slot, node) in enumerate(places):
        try:
            expected = stated(list(logits[row].numpy()), cases[slot], cases[slot].drafted(node))
        except TooClose:
            skipped += 1
            continue
        changed += not torch.equal(logits[row], found[row])
        assert found[row].tolist() == [float(value) for value in expected], (seed, slot, node, cases[slot])
    assert skipped <= 2, f"{skipped} rows of {len(places)} could not be judged"
    assert changed >= least, "no row was changed, so nothing was tested"
    return changed


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
