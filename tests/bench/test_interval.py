"""The interval of a speed-up: against all resamples written out, and against how often it holds the truth."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from paceline.bench.interval import RESAMPLES, Cost, Estimate, estimate, method


def cost(spent: Any, tokens: Any = None) -> Cost:
    array = np.asarray(spent, dtype=float)
    return Cost(array, np.ones_like(array) if tokens is None else np.asarray(tokens, dtype=float))


def every_ratio(base: Cost, other: Cost) -> list[float]:
    """All equally likely resamples, by the definition: plain loops, one resample at a time."""
    num_rounds, num_prompts = base.spent.shape
    found = []
    for prompts in itertools.product(range(num_prompts), repeat=num_prompts):
        for rounds in itertools.product(range(num_rounds), repeat=num_rounds):
            rates = []
            for one in (base, other):
                each = [sum(one.tokens[r][p] for p in prompts) / sum(one.spent[r][p] for p in prompts) for r in rounds]
                rates.append(float(np.median(each)))
            found.append(rates[1] / rates[0])
    return found


@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (3, 3), (4, 1)])
def test_its_ends_are_the_quantiles_of_all_resamples(shape: tuple[int, int]) -> None:
    """Within what drawing RESAMPLES of them leaves open: five standard deviations of a share of a tail."""
    draw = np.random.default_rng(11)
    tokens = draw.integers(5, 90, shape)
    base, other = (cost(draw.lognormal(0, 0.5, shape) * tokens, tokens) for _ in range(2))
    everything = np.array(every_ratio(base, other))
    found = estimate(base, other)
    assert found.low is not None and found.high is not None
    slack = 5 * math.sqrt(0.025 * 0.975 / RESAMPLES)
    rounding = 1e-12 * found.value
    for end, wanted in ((found.low, 0.025), (found.high, 0.975)):
        below, up_to = np.mean(everything < end - rounding), np.mean(everything <= end + rounding)
        assert below - slack <= wanted <= up_to + slack


def test_the_ratio_is_that_of_the_medians_over_rounds_of_tokens_over_cost() -> None:
    base = cost([[1.0, 3.0], [2.0, 2.0], [9.0, 9.0]], [[10, 20], [10, 20], [10, 20]])
    other = cost([[1.0, 1.0], [0.5, 0.5], [1.0, 2.0]], [[10, 20], [10, 20], [10, 20]])
    assert estimate(base, other).value == pytest.approx((30 / 2) / (30 / 4))


def test_the_same_costs_are_exactly_one_however_they_scatter() -> None:
    base = cost(np.random.default_rng(3).lognormal(0, 1, (3, 20)))
    assert estimate(base, base) == Estimate(1.0, 1.0, 1.0)


def test_pairing_removes_what_prompts_and_rounds_have_in_common() -> None:
    base = cost(np.random.default_rng(4).lognormal(0, 1, (4, 20)))
    found = estimate(base, cost(base.spent / 2))
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0), abs=1e-12)


def test_one_answer_measured_once_has_no_interval_and_two_rounds_of_it_have_one() -> None:
    assert estimate(cost([[3.0]]), cost([[2.0]])) == Estimate(1.5)
    found = estimate(cost([[3.0], [4.0]]), cost([[2.0], [2.0]]))
    assert (found.low, found.high) == (1.5, 2.0)


def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    """The true ratio is 1.3. Percentile intervals of 40 prompts hold it a little less than 95 times in 100: 94.

    250 measurements: a share whose truth is 0.94 lies within 0.88 … 0.995 but for one time in 10 000.
    """
    draw = np.random.default_rng(5)
    held = 0
    for _ in range(250):
        length = draw.lognormal(0, 0.6, (1, 40))
        base = length * draw.normal(1, 0.03, (3, 40)) * draw.normal(1, 0.05, (3, 1))
        gain = draw.lognormal(0, 0.25, (1, 40))
        other = length * gain / (1.3 * math.exp(0.25**2 / 2)) * draw.normal(1, 0.03, (3, 40))
        found = estimate(cost(base), cost(other))
        assert found.low is not None and found.high is not None
        held += found.low <= 1.3 <= found.high
    assert 0.88 <= held / 250 <= 0.995


def test_what_it_says_of_itself() -> None:
    assert str(Estimate(1.266, 1.204, 1.336)) == "1.27× as fast as plain decoding (95% interval 1.20–1.34)"
    assert str(Estimate(1.266)) == "1.27× as fast as plain decoding"
    assert Estimate(1.1, 1.01, 1.2).above_one
    assert not Estimate(1.1, 0.99, 1.2).above_one
    assert not Estimate(1.1).above_one
    assert method()["resamples"] == RESAMPLES
