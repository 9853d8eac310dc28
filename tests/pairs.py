"""Pairs instead of full products: few rows that hold each value of a factor with each value of every other one."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any


def missing(rows: Sequence[tuple[Any, ...]], factors: Sequence[Collection[Any]]) -> set[tuple[Any, Any]]:
    """Pairs of values that stand in no row together; a row has a value of each factor, in their order."""
    found = set()
    for one, other in itertools.combinations(range(len(factors)), 2):
        found |= {*itertools.product(factors[one], factors[other])} - {(row[one], row[other]) for row in rows}
    return found
