"""How many times cheaper, and how sure that is: one ratio, and its interval by a paired bootstrap.

Knows arrays of costs and tokens, by round and by prompt. Must not know what was measured or how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """What answers cost (seconds, or forwards of the target) and how many tokens they gave, both [rounds, prompts]."""

    spent: Array
    tokens: Array


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval; no interval where one answer, measured once, is all there is."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" (95% interval {self.low:.2f}–{self.high:.2f})"
        return f"{self.value:.2f}× as fast as plain decoding{bounds}"

    @property
    def above_one(self) -> bool:
        """Whether all of the interval lies above 1: cheaper, and not by chance of these prompts and rounds."""
        return self.low is not None and self.low > 1


def estimate(base: Cost, other: Cost) -> Estimate:
    """How many times more tokens `other` gives for the same cost.

    Each round's tokens over its cost, the median over rounds, over the same of `base`. The interval: prompts and
    rounds are drawn anew with replacement, RESAMPLES times, the same ones for both (what is slow for one is slow for
    the other: a long answer, a busy machine), and the middle CONFIDENCE of the ratios is kept.
    """
    num_rounds, num_prompts = base.spent.shape
    once, first = np.ones((1, num_prompts)), np.arange(num_rounds)[None]
    ratio = float((_rates(other, once, first) / _rates(base, once, first))[0])
    if num_rounds * num_prompts == 1:
        return Estimate(ratio)
    draw = np.random.default_rng(SEED)
    counts = draw.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=RESAMPLES)
    rounds = draw.integers(num_rounds, size=(RESAMPLES, num_rounds))
    ratios = _rates(other, counts, rounds) / _rates(base, counts, rounds)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Estimate(ratio, float(low), float(high))


def _rates(cost: Cost, counts: Any, rounds: Any) -> Array:
    """[S]: tokens over cost with each prompt counted so often [S, P] and these rounds taken [S, R], their median."""
    each = (counts @ cost.tokens.T) / (counts @ cost.spent.T)  # [S, R]
    return np.asarray(np.median(np.take_along_axis(each, rounds, axis=1), axis=1))


def method() -> dict[str, Any]:
    """For the record."""
    return {
        "confidence": CONFIDENCE,
        "method": "paired bootstrap over prompts and rounds, percentiles",
        "resamples": RESAMPLES,
        "seed": SEED,
    }
