"""The text's distribution, from samples: first of `draw` and `verify` together, then of the whole engine.

Every chi-square test here has alpha = 1e-4 and fixed seeds. Its power does not depend on what a deviation looks like
(see checks.detectable_distance): with probability 0.99 or more it finds any total variation of at least

    0.026   20000 samples of one token of 6, draw and verify alone
    0.090   4096 samples of a pair of two tokens of 11 (121 cells), through the engine
"""

from __future__ import annotations

import pytest

from paceline.drafters.draft_model import DraftModel
from paceline.drafters.ngram import NGram
from tests.sampling.checks import detectable_distance
from tests.sampling.spoken import (
    ALPHA,
    POWER,
    SAMPLES,
    SHAPES,
    SMALL,
    TEXTS,
    VOCAB,
    chain_of,
    check_spoken,
    check_text,
    make_llm,
    model_of,
    speak,
)


def test_the_stated_power_is_what_the_noncentral_chi_square_says() -> None:
    assert detectable_distance(SAMPLES, SMALL, ALPHA, POWER) <= 0.026
    assert detectable_distance(TEXTS, VOCAB**2, ALPHA, POWER) <= 0.090


# draw and verify alone: one p and one q for everybody, thousands of slots that differ in their seed


@pytest.mark.parametrize("acceptance, shape", [("rejection", name) for name in SHAPES] + [("block", "chain")])
@pytest.mark.parametrize("how", ["drawn", "chosen"])
def test_drawing_and_verifying_together_give_the_targets_distribution(acceptance: str, shape: str, how: str) -> None:
    check_spoken(SHAPES[shape], acceptance, how)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_chains_that_end_where_they_are_unlikely_give_the_targets_distribution(acceptance: str) -> None:
    """Were a draft left out because it is itself unlikely, its token would be said too seldom."""
    check_spoken(SHAPES["chain"], acceptance, "shortened")


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_gives_the_targets_distribution_and_drafts_with_its_noise(shape: str) -> None:
    check_spoken(SHAPES[shape], "exact")


# The whole engine


DRAFTERS = {"draft model": DraftModel(model_of(1), 3), "ngram": NGram(3, min_match=1, max_match=2)}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block"])
def test_the_engines_texts_have_the_targets_distribution(acceptance: str, drafter: str) -> None:
    texts, kinds = speak(make_llm(acceptance, DRAFTERS[drafter]), temperature=1.5)
    assert kinds["accepted"] > 300 and kinds["corrected"] > 300, kinds
    check_text(texts, chain_of(1.5))
