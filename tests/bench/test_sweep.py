"""Draft lengths: how they are written, which is best, and how repetitive the text was."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline import DraftModel, FirstOf, NGram, SamplingParams, Suffix
from paceline.bench import sweep
from paceline.bench.compare import compare
from paceline.bench.interval import Estimate
from paceline.bench.measured import Comparison, Plan
from paceline.bench.sweep import Best, find_best, make_variants, read_lengths, repeated_share
from paceline.errors import OptionError
from tests.bench.asked import NAMES, PROMPTS
from tests.bench.examples import comparison
from tests.fakes import tiny_llm


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1..10", list(range(1, 11))),
        ("1-10", list(range(1, 11))),
        ("1,2,4", [1, 2, 4]),
        ("5", [5]),
        ("4,2,2", [2, 4]),
        ("1..3,8, 12-13", [1, 2, 3, 8, 12, 13]),
        (" 2 .. 3 ", [2, 3]),
    ],
)
def test_lengths_are_read_in_every_spelling(text: str, lengths: list[int]) -> None:
    assert read_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "0..3", "3..1", "a", "1..", "1,,2", "-1", "1.5", "1..2..3", "9" * 30])
def test_other_lengths_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(OptionError, match=r"allowed: numbers of 1 or more, written 1\.\.10, 1,2,4 or 5"):
        read_lengths(text)


@pytest.mark.parametrize("text", ["1..1000", "1..64,70..133", "1..64,65", "1..999999"])
def test_more_lengths_than_can_be_run_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=f"draft lengths '{re.escape(text)}' are too many; at most 64 are run"):
        read_lengths(text)
    assert len(read_lengths("1..64,1..64")) == 64


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("ngram", NGram(), "ngram:num_draft_tokens=3"),
        ("suffix:tree=true", Suffix(tree=True), "suffix:tree=true,num_draft_tokens=3"),
        ("./some/model", DraftModel("./some/model"), "./some/model:num_draft_tokens=3"),
        ("./run,seed=1", DraftModel("./run,seed=1"), "./run,seed=1:num_draft_tokens=3"),
    ],
)
def test_a_length_is_named_as_a_user_would_type_it(name: str, config: Any, expected: str) -> None:
    from paceline.cli import drafters

    (variant,) = make_variants(name, config, [3])
    assert (variant.name, variant.draft_length) == (expected, 3)
    assert variant.drafter == drafters.parse(variant.name)


@pytest.mark.parametrize("config", [None, FirstOf("ngram", "suffix")])
def test_a_drafter_without_a_length_is_refused(config: Any) -> None:
    with pytest.raises(OptionError, match="'x' has no num_draft_tokens to sweep"):
        make_variants("x", config, [1])


def swept(seconds: dict[int, list[float]]) -> Comparison:
    """Plain decoding takes a second an answer; a draft length takes what is given."""
    count = len(next(iter(seconds.values())))
    return comparison({"plain": [1.0] * count, **{str(length): spent for length, spent in seconds.items()}})


def test_the_best_length_is_the_fastest_and_its_rivals_are_those_it_cannot_be_told_from() -> None:
    found = find_best(
        swept({1: [0.8] * 5, 2: [0.5] * 5, 3: [0.49, 0.51, 0.49, 0.5, 0.5], 5: [0.45, 0.55, 0.5, 0.49, 0.52]})
    )
    assert found is not None
    assert (found.length, found.rivals) == (3, [2, 5])
    assert found.speed_up.value == pytest.approx(5 / 2.49)
    assert found.speed_up.above_one
    assert found.verdict == f"The fastest was a draft length of 3: {found.speed_up}. 2, 5 cannot be told from it."


def test_a_best_length_that_gains_nothing_is_said_to_gain_nothing() -> None:
    slower = find_best(swept({1: [1.5] * 4, 2: [1.25] * 4}))
    assert slower is not None
    assert slower.verdict == (
        "Nothing was faster than plain decoding here; a draft length of 2 lost least, 0.80× as fast as plain decoding "
        "(95% interval 0.80–0.80)."
    )
    unsure = find_best(swept({1: [0.5, 1.4, 1.2, 0.7]}))
    assert unsure is not None
    assert unsure.verdict.endswith("but it cannot be told from plain decoding.")
    assert unsure.rivals == []


def test_one_answer_measured_once_proves_nothing() -> None:
    assert Best(2, Estimate(1.5), []).verdict.endswith("but one answer, measured once, proves nothing.")


def test_without_a_draft_length_there_is_no_best() -> None:
    assert find_best(comparison({"plain": [1.0, 1.0]})) is None


def test_the_share_of_repeated_runs_of_four() -> None:
    assert repeated_share([[1, 2, 3, 4, 5, 6]]) == 0.0
    assert repeated_share([[7] * 13]) == pytest.approx(9 / 10)
    # 1 2 3 4, 2 3 4 1, 3 4 1 2, 4 1 2 3, 1 2 3 4: the last was there before
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    # in another answer it is no repetition
    assert repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0
    assert repeated_share([[1, 2, 3]]) is None


def test_a_sweep_drafts_no_more_than_each_length_and_says_the_same_each_time() -> None:
    variants = make_variants("ngram", NGram(min_match=1, max_match=2), [1, 2, 4])
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    result = compare(tiny_llm(prefix_caching=False, max_num_seqs=1), Plan(NAMES, PROMPTS, params, variants))
    assert [len(measured.stats.proposed) for measured in result.measured] == [0, 1, 2, 4]
    assert [measured.num_identical for measured in result.measured] == [3] * 4
    forwards = [result.forward_speed_up(measured).value for measured in result.measured]
    assert forwards[0] == 1.0
    assert all(1 < value <= 1 + length for value, length in zip(forwards[1:], (1, 2, 4)))
    best = find_best(result)
    assert best is not None and best.length in (1, 2, 4)
    assert sweep.repeated_share(answer.output.token_ids for answer in result.plain.passes[0].answers) is not None
