"""Tapped states reach the drafter at the right positions: chunks, trees, prefix hits, switches and rounds ahead."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from tests.drafters.contract import SETTINGS, plain, prompts, recorded
from tests.fakes import Recorded, Tapping, check_books, tiny_llm, tiny_model

BEHIND = pytest.mark.parametrize("behind", [None, 0, 1, 2])
Pairs = dict[tuple[int, ...], Tensor]


@functools.cache
def wanted_states(tokens: tuple[int, ...]) -> Tensor:
    """[positions, 2H]: after the last norm, and after one layer, from transformers."""
    with torch.no_grad():
        states = tiny_model()(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([states[-1][0], states[1][0]], dim=1)


def assert_true(pairs: Pairs) -> None:
    """Every pair holds the target's own state at the place before its token: zeros, say, would not."""
    whole: dict[tuple[int, ...], Tensor] = {}
    for text in sorted(pairs, key=len, reverse=True):  # a beginning of a text that was computed is not computed again
        states = whole.get(text)
        if states is None:
            states = wanted_states(text)
            whole |= {text[:length]: states for length in range(1, len(text) + 1)}
        assert (pairs[text] - states[len(text) - 2]).abs().max() <= 1e-4


def places(pairs: Pairs, text: list[int]) -> set[int]:
    """The positions of a text whose pairs were seen."""
    return {place for place in range(1, len(text)) if tuple(text[: place + 1]) in pairs}


def generate(llm: LLM, given: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
    """The whole texts."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [prompt + result.outputs[0].token_ids for prompt, result in zip(given, llm.generate(given, params))]


class Texts(dict[tuple[int, ...], list[int]]):
    """What plain decoding says to any prompt, found when asked for."""

    def __missing__(self, prompt: tuple[int, ...]) -> list[int]:
        self[prompt] = generate(plain_llm(), [list(prompt)], 24)[0]
        return self[prompt]


@functools.cache
def plain_llm() -> LLM:
    return tiny_llm()


TEXTS: Recorded = Texts()


@BEHIND
def test_every_pair_holds_the_following_token_and_the_targets_own_state(behind: int | None) -> None:
    drafter = Tapping(recorded(3, "greedy"), seed=5)
    llm = tiny_llm(drafter, behind, max_batched_tokens=9, block_size=8)
    outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")
    assert_true(drafter.pairs)
    for output in outputs:
        text = output.prompt_token_ids + output.outputs[0].token_ids
        assert places(drafter.pairs, text) == set(range(1, len(text))), "each place but the first has its pair"
    assert sum(drafter.histogram.branches[branch] for branch in (1, 2)) > 0, "rows of side branches were kept"


@functools.cache
def fresh(prompt: tuple[int, ...], max_tokens: int) -> tuple[Pairs, list[int]]:
    """The pairs of a run without any hit, and its text."""
    drafter = Tapping(TEXTS, seed=5)
    (text,) = generate(tiny_llm(drafter), [list(prompt)], max_tokens)
    return drafter.pairs, text


@BEHIND
@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_after_a_hit_of_any_length_the_pairs_are_those_of_a_fresh_run(
    number: int, block_size: int, behind: int | None
) -> None:
    """The pair that crosses the end of the hit is there as well: the page keeps the state of its last position."""
    whole = prompts(3)[number]
    drafter = Tapping(TEXTS, seed=5)
    llm = tiny_llm(drafter, behind, block_size=block_size, prefix_caching=True)
    generate(llm, [whole], 1)
    hits = set()
    for length in range(block_size, len(whole), block_size):
        # so many tokens in common, then something else: the hit ends there
        prompt = [*whole[:length], (whole[length] + 1) % 97, 5, 6]
        expected, text = fresh(tuple(prompt), 8)
        drafter.pairs.clear()
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt], params)[0].outputs
        assert prompt + output.token_ids == text and output.stats.prefix_hit == length
        hits.add(length)
        # Seen are the crossing pair and all behind it, exactly as in the fresh run.
        last = len(text) - 1
        assert places(drafter.pairs, text) == set(range(length, last + 1))
        for place in range(length, last + 1):
            key = tuple(text[: place + 1])
            assert (drafter.pairs[key] - expected[key]).abs().max() == 0
        assert not drafter.missing, "everything was tapped, so nothing is marked"
    assert len(hits) == (len(whole) - 1) // block_size
    assert_true(drafter.pairs)


@BEHIND
@pytest.mark.parametrize("block_size", [4, 8])
def test_a_hit_on_pages_filled_while_nobody_tapped_is_marked_as_not_there(block_size: int, behind: int | None) -> None:
    """Never zeros taken for real: the crossing pair is not valid, and all behind it are."""
    whole = prompts(3)[1]
    llm = tiny_llm(None, behind, block_size=block_size)
    generate(llm, [whole], 1)
    for length in range(block_size, len(whole), block_size):
        prompt = [*whole[:length], (whole[length] + 1) % 97, 5, 6]
        drafter = Tapping(TEXTS, seed=5)
        llm.set_drafter(drafter)
        (text,) = generate(llm, [prompt])
        assert places(drafter.pairs, text) == set(range(length + 1, len(text)))
        assert [place for _, place in drafter.missing] == [0], "marked, and it belongs to nobody"
        assert_true(drafter.pairs)
        llm.set_drafter(None)


@BEHIND
def test_a_hit_across_tapped_and_untapped_pages_knows_which_is_which(behind: int | None) -> None:
    """Pages 0 … 2 by a drafter that tapped, 3 … 5 by nobody; hits that end in either half, side by side."""
    whole, size = prompts(3)[1], 4
    llm = tiny_llm(Tapping(TEXTS, seed=5), behind, block_size=size)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Tapping)
    generate(llm, [whole[:13]], 1)
    cache, tails = llm.engine.cache, llm.engine.cache.tails
    llm.engine.runner.set_drafter(None)  # pauses; its tails stay where they are
    generate(llm, [whole[:25]], 1)
    llm.engine.runner.set_drafter(drafter)
    assert cache.tails is tails
    given = [[*whole[:length], (whole[length] + 1) % 97, 5, 6] for length in (12, 24)]
    drafter.pairs.clear()
    texts = generate(llm, given)
    assert places(drafter.pairs, texts[0]) == set(range(12, len(texts[0])))
    assert places(drafter.pairs, texts[1]) == set(range(25, len(texts[1]))), "the state before it was never kept"
    assert_true(drafter.pairs)


@BEHIND
@pytest.mark.parametrize("switch_after", [1, 2, 3, 4, 5])
def test_a_drafter_switched_on_in_the_middle_is_told_from_there_on(switch_after: int, behind: int | None) -> None:
    """The state in front of its first row was kept nowhere, wherever in a page it stands: no pair is made of it."""
    prompt = prompts(3)[0]
    llm = tiny_llm(None, behind, block_size=4)
    drafter, tokens = Tapping(TEXTS, seed=5), []
    switched = None
    for chunk in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)):
        tokens += chunk.token_ids
        if switched is None and len(tokens) >= switch_after:
            llm.set_drafter(drafter)
            (sequence,) = llm.engine.scheduler.running
            assert not sequence.ahead
            switched = len(sequence.tokens)  # the newest is computed by the first round it sees
        check_books(llm)
    text = prompt + tokens
    assert switched is not None and text == TEXTS[tuple(prompt)][: len(text)]
    assert places(drafter.pairs, text) == set(range(switched, len(text)))
    assert_true(drafter.pairs)


@BEHIND
def test_a_drafter_switched_off_and_on_again_trusts_nothing_it_was_told_before(behind: int | None) -> None:
    prompt = prompts(3)[1]
    llm = tiny_llm(Tapping(TEXTS, seed=5), behind, block_size=4)
    generate(llm, [prompt], 1)
    again = Tapping(TEXTS, seed=6)
    llm.set_drafter(again)
    (text,) = generate(llm, [prompt])
    hit = (len(prompt) - 1) // 4 * 4
    assert places(again.pairs, text) == set(range(hit + 1, len(text))) and [p for _, p in again.missing] == [0]
    assert_true(again.pairs)


@BEHIND
def test_a_preempted_sequence_sees_its_pairs_again_and_they_are_the_same(behind: int | None) -> None:
    """Tapping itself holds every pair that comes twice against the first."""
    drafter = Tapping(TEXTS, seed=5)
    options: dict[str, Any] = {"block_size": 4, "num_pages": 22, "max_model_len": 80}
    llm = tiny_llm(drafter, behind, **options)
    texts = generate(llm, prompts(3), 20)
    assert texts == [TEXTS[tuple(prompt)][: len(prompt) + 20] for prompt in prompts(3)]
    assert llm.engine.scheduler.num_preemptions > 0
    for text in texts:
        assert places(drafter.pairs, text) == set(range(1, len(text)))
    assert_true(drafter.pairs)


@BEHIND
def test_samples_of_one_prompt_each_see_the_pair_that_crosses_it(behind: int | None) -> None:
    prompt = prompts(3)[2]
    drafter = Tapping(TEXTS, seed=5)
    llm = tiny_llm(drafter, behind, block_size=4)
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([prompt], params)[0].outputs
    assert [output.stats.prefix_hit for output in outputs] == [0, 20, 20]
    for output in outputs:
        text = prompt + output.token_ids
        assert places(drafter.pairs, text) == set(range(1, len(text)))
    assert_true(drafter.pairs)
