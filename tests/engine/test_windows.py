"""Layers that look back only so far give the pages behind back, and not one token changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from paceline import LLM, DraftModel, EarlyExit, Lookahead, NGram, SamplingParams, Suffix
from paceline.cache.pages import PagePool
from paceline.testing import BATCHES, SETTINGS, SITUATIONS, launch, prompts, set_apart, tokens_of
from tests.drafters.contract import DRAFTERS
from tests.engine.windows import KINDS, WIDTH, whole_llm, windowed_llm, windowed_model
from tests.fakes import Hopeless, Oracle, Recorded, Replay, check_books
from tests.native import EXACT, marked
from tests.pairs import missing

KERNELS = ("reference", "native")
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": 4}


@functools.cache
def plain(kind: str, kernels: str, batch: int, setting: str) -> list[list[int]]:
    return tokens_of(whole_llm(kind, kernels=kernels), batch, setting)


def known(kind: str, kernels: str, batch: int, setting: str) -> Recorded:
    said = plain(kind, kernels, batch, setting)
    return {tuple(p): p + out for p, out in zip(prompts(batch), said)}


# Of those that fit any target; a draft model with windows keeps all of its pages.
ANY: dict[str, Callable[[Recorded], Any]] = {
    "none": lambda known: None,
    "ngram": lambda known: NGram(5, min_match=1, max_match=3),
    "suffix_tree": lambda known: Suffix(tree=True, max_spec_factor=4.0, min_token_prob=0.01),
    "draft_model": lambda known: DraftModel(windowed_model("gemma3"), 4),
    "oracle": lambda known: Oracle(known, 14),
    "hopeless_tree": lambda known: Hopeless(known, 4, trees=True),
    "replay": lambda known: Replay(known, seed=3, trees=False),
    "replay_tree": lambda known: Replay(known, seed=3, trees=True),
    "lookahead": lambda known: Lookahead(window=3, ngram=4, guesses=2),
    "early_exit": lambda known: EarlyExit(3, layers=1),
}
OF_ITS_SHAPE = [name for name in DRAFTERS if name.startswith(("eagle", "hydra", "medusa", "pard", "dflash", "pair"))]


def in_turn() -> list[tuple[str, int, str, str, str, str]]:
    """Each drafter in each situation, with models, batches, settings and kernels in turn."""
    rows = []
    for first, name in enumerate(ANY):
        for second, situation in enumerate(SITUATIONS):
            turn, setting = first + second + first // 2, list(SETTINGS)[(first + second) % 3]
            row = (name, BATCHES[(turn + second // 3) % 2], situation, setting, KINDS[turn % 2], KERNELS[turn // 2 % 2])
            rows.append(row)
    return rows


def test_every_pair_is_run() -> None:
    assert not missing(in_turn(), (ANY, BATCHES, SITUATIONS, SETTINGS, KINDS, KERNELS))


@pytest.mark.parametrize("name, batch, situation, setting, kind, kernels", marked(in_turn()))
def test_no_token_changes_when_pages_are_given_back(
    name: str, batch: int, situation: str, setting: str, kind: str, kernels: str
) -> None:
    drafter = ANY[name](known(kind, kernels, batch, setting))
    llm = windowed_llm(kind, drafter, **{**SITUATIONS[situation], "kernels": kernels})
    assert tokens_of(llm, batch, setting) == plain(kind, kernels, batch, setting)
    assert tokens_of(llm, batch, setting) == plain(kind, kernels, batch, setting), "once more, with what is known"
    if "preempted" in situation and batch == 3:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_pytorchs_kernels_pick_the_right_pages_too(kind: str, behind: int | None) -> None:
    """They are not row-invariant; a batch of the same shape gives the same."""
    wanted = (
        set_apart(whole_llm(kind, kernels="torch", **SMALL), behind) if behind else whole_llm(kind, kernels="torch")
    )
    llm = windowed_llm(kind, None, behind, kernels="torch", **SMALL)
    assert tokens_of(llm, 3, "greedy") == tokens_of(wanted, 3, "greedy")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_under_windows_waits_for_the_device(kind: str) -> None:
    """On a device without data any read by the host raises."""
    model = windowed_model(kind)
    options = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "budget": "fixed"}
    llm = LLM(model, device=torch.device("meta"), kernels="torch", **options)
    assert llm.engine.table.windowed is not None
    llm.engine.depth = 1000
    llm.set_drafter(EarlyExit(2, layers=1))
    launch(llm, "greedy")


@pytest.mark.parametrize("number, name", list(enumerate(OF_ITS_SHAPE)))
def test_learned_drafters_change_no_token_either(number: int, name: str) -> None:
    batch, setting = BATCHES[number % 2], list(SETTINGS)[number // 2 % 3]
    behind = (None, 1, 2)[number % 3]
    llm = windowed_llm("mistral", DRAFTERS[name](known("mistral", "reference", batch, setting)), behind, **SMALL)
    for _ in range(2):
        assert tokens_of(llm, batch, setting) == plain("mistral", "reference", batch, setting)


def held(llm: LLM) -> int:
    """The most pages a running sequence holds for layers with windows."""
    windowed = llm.engine.table.windowed
    assert windowed is not None
    return max((len(one.pages) for one in windowed.held.values()), default=0)


@pytest.mark.parametrize("behind", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_holds_only_the_pages_its_window_shows(kind: str, behind: int | None) -> None:
    llm = windowed_llm(kind, None, behind, **SMALL, max_batched_tokens=8)
    llm.add([5] * 50, SamplingParams(temperature=0, max_tokens=130, ignore_eos=True))
    whole = most = 0
    while llm.engine.has_work:
        llm.step()
        check_books(llm)
        most = max(most, held(llm))
        whole = max([whole, *(len(sequence.pages) for sequence in llm.engine.scheduler.running)])
    assert whole >= 180 // 4
    rows = 8 * (1 + (behind or 0))  # a chunk, and those ahead of it
    assert most <= (WIDTH + rows) // 4 + 2


@pytest.mark.parametrize("kernels", EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_found_after_its_first_pages_were_given_back(kind: str, kernels: str) -> None:
    llm = windowed_llm(kind, kernels=kernels, **SMALL)
    question = list(range(3, 83))
    first = llm.generate([question], GREEDY)[0].outputs[0].token_ids
    longer = [*question, *first, 7, 8, 9]
    wanted = whole_llm(kind, kernels=kernels).generate([longer], GREEDY)[0].outputs[0].token_ids
    output = llm.generate([longer], GREEDY)[0].outputs[0]
    assert output.token_ids == wanted and output.stats.prefix_hit == 136
    check_books(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_as_long_as_what_its_window_would_show_is_there(kind: str) -> None:
    llm = windowed_llm(kind, **SMALL)
    question = list(range(3, 83))
    windowed = llm.engine.table.windowed
    assert windowed is not None

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
        check_books(llm)
        return output.token_ids, output.stats.prefix_hit

    def forget_all_but(count: int) -> None:
        taken = windowed.pool.take(windowed.pool.num_available - count)
        assert taken is not None
        windowed.pool.release(taken)

    first, hit = ask(question)
    assert hit == 0 and ask(question) == (first, 76)
    assert ask(question[:41])[1] == 40
    forget_all_but(7)  # what those 41 tokens and the 20 behind them see is known longest
    assert ask(question) == (first, 40), "the other pages know more of it"
    assert ask(question) == (first, 76), "what was computed again is known again"
    forget_all_but(0)
    assert ask(question) == (first, 0)


@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("kernels", EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_an_early_exit_after_the_last_layer_is_always_right(kind: str, kernels: str, behind: int | None) -> None:
    """So it sees what the target sees, under the same pages."""
    layers = windowed_model(kind).config.num_hidden_layers
    llm = windowed_llm(kind, EarlyExit(3, layers=layers), behind, **SMALL, kernels=kernels)
    for output in llm.generate(prompts(3), GREEDY):
        stats = output.outputs[0].stats
        assert stats.accepted == stats.proposed and sum(stats.accepted) > 40


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_prompt_share_its_pages_under_windows(kind: str) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=30, ignore_eos=True)
    question = list(range(3, 40))
    wanted = [o.token_ids for o in whole_llm(kind, max_num_seqs=2).generate([question], params)[0].outputs]
    llm = windowed_llm(kind, max_num_seqs=2, **SMALL)
    outputs = llm.generate([question], params)[0].outputs
    assert [output.token_ids for output in outputs] == wanted
    assert [output.stats.prefix_hit for output in outputs] == [0, 36, 36]


@pytest.mark.parametrize("behind", [None, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_when_pages_under_windows_run_out_the_newest_starts_again(kind: str, behind: int | None) -> None:
    """The other pages would do for all of them."""
    with mock.patch("paceline.engine.memory.count_windowed", lambda *given: 8):
        llm = windowed_llm(kind, None, behind, **SMALL, max_batched_tokens=9)
    short = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    wanted = whole_llm(kind).generate(short, GREEDY)
    found = llm.generate(short, GREEDY)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    assert llm.engine.scheduler.num_preemptions > 0
    check_books(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_failure_everything_is_said_as_before(kind: str) -> None:
    llm = windowed_llm(kind, **SMALL)
    wanted = [output.outputs[0].token_ids for output in llm.generate(prompts(3), GREEDY)]
    with mock.patch.object(llm.engine.runner, "run", side_effect=RuntimeError("broken")), pytest.raises(RuntimeError):
        llm.generate(prompts(3), GREEDY)
    check_books(llm)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts(3), GREEDY)] == wanted


def test_where_nothing_is_ever_out_of_sight_there_is_one_kind_of_pages() -> None:
    model = windowed_model("mistral")
    assert LLM(model, max_model_len=WIDTH, device="cpu").engine.table.windowed is None
    assert LLM(model, max_model_len=WIDTH + 1, device="cpu").engine.table.windowed is not None


def test_pages_given_back_are_the_pools_again() -> None:
    llm = windowed_llm("gemma3", **SMALL)
    windowed = llm.engine.table.windowed
    assert windowed is not None and isinstance(windowed.pool, PagePool)
    llm.generate(prompts(3), GREEDY)
    assert windowed.pool.num_available == windowed.pool.num_pages and not windowed.held
