"""Counts against a distribution: the G-test with Williams' correction, and the bias it would have found.

Knows numbers alone. Cells that expect fewer than LEAST are thrown together, since the test's distribution is known only
where enough is expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

LEAST = 5.0  # expected in a cell

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tested:
    """p: how often chance alone gives a statistic as large. impossible: outcomes of probability 0."""

    samples: int
    statistic: float
    freedom: int
    p: float
    impossible: int = 0


def test(counts: Array, shares: Array) -> Tested:
    """Counts by outcome against the probabilities of these; an outcome that cannot happen is proof enough."""
    total = float(counts.sum())
    impossible = int(counts[shares <= 0].sum())
    if impossible:
        return Tested(int(total), math.inf, 1, 0.0, impossible)
    seen, hoped = _fold(counts, total * shares)
    freedom = len(hoped) - 1
    if freedom < 1:
        return Tested(int(total), 0.0, 0, 1.0)
    hit = seen > 0
    statistic = 2 * float((seen[hit] * np.log(seen[hit] / hoped[hit])).sum())
    # Williams, 1976: without it the statistic is too large where little is expected.
    statistic /= 1 + float((total / hoped).sum() - 1) / (6 * total * freedom)
    return Tested(int(total), max(statistic, 0.0), freedom, chance(statistic, freedom))


def pool(tested: list[Tested]) -> Tested:
    """Independent tests as one: a bias that is small everywhere adds up."""
    statistic, freedom = sum(one.statistic for one in tested), sum(one.freedom for one in tested)
    impossible = sum(one.impossible for one in tested)
    p = 0.0 if impossible else chance(statistic, freedom)
    return Tested(sum(one.samples for one in tested), statistic, freedom, p, impossible)


def _fold(counts: Array, expected: Array) -> tuple[Array, Array]:
    """Small cells as one; if that one is small too, it joins the smallest of the others."""
    small = expected < LEAST
    seen, hoped = counts[~small], expected[~small]
    if not small.any():
        return seen, hoped
    rest, wanted = float(counts[small].sum()), float(expected[small].sum())
    if wanted >= LEAST or not len(hoped):
        return np.append(seen, rest), np.append(hoped, wanted)
    least = int(hoped.argmin())
    seen, hoped = seen.copy(), hoped.copy()
    seen[least] += rest
    hoped[least] += wanted
    return seen, hoped


def chance(statistic: float, freedom: int) -> float:
    """That a chi-square of so many degrees of freedom is at least that large."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def find_bias(samples: int, freedom: int, alpha: float, power: float = 0.99) -> float | None:
    """The total variation that a test finds with that power, whatever the bias looks like; None: it finds none.

    The noncentrality is N·Σ d²/p, at least 4·N·TV² by Cauchy and Schwarz.
    """
    if freedom < 1 or samples < 1:
        return None
    critical = _bisect(lambda value: chance(value, freedom) < alpha, 1.0)
    needed = _bisect(lambda value: _noncentral(critical, freedom, value) > power, 1.0)
    found = math.sqrt(needed / (4 * samples))
    return found if found < 1 else None


def _bisect(reached: Callable[[float], bool], high: float) -> float:
    """The least value at which it is reached."""
    while not reached(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _noncentral(critical: float, freedom: int, shift: float) -> float:
    """That a noncentral chi-square is at least `critical`: central ones, mixed by Poisson's weights."""
    spread = 12 * math.sqrt(shift / 2 + 1)
    first, last = max(0, int(shift / 2 - spread)), int(shift / 2 + spread) + 1
    terms = torch.arange(first, last + 1, dtype=torch.float64)
    logs = terms * math.log(shift / 2) - shift / 2 - torch.lgamma(terms + 1)
    above = torch.special.gammaincc(freedom / 2 + terms, torch.tensor(critical / 2, dtype=torch.float64))
    return float((torch.exp(logs) * above).sum())
