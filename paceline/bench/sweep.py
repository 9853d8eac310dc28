"""How long should drafts be? The same drafter at many draft lengths, plain decoding beside them.

Knows what is varied and how the best length is told from the others. The measuring itself is `compare`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from paceline.bench.interval import Estimate
from paceline.bench.measured import Comparison, Variant, estimate_between
from paceline.drafters.table import LENGTH
from paceline.drafters.table import listed as listed_drafters
from paceline.errors import OptionError

MAX_LENGTHS = 64
REPEATED = 4  # tokens in a row


def read_lengths(text: str) -> list[int]:
    """1..10, 1-10, 1,2,4, 5, or several of these with commas; in order, each once."""
    lengths: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*(?:(?:\.\.|-)\s*(\d{1,6})\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise OptionError(
                f"draft lengths {text!r} are not allowed; allowed: numbers of 1 or more, written 1..10, 1,2,4 or 5"
            )
        lengths |= set(range(first, last + 1)[: MAX_LENGTHS + 1])
        if len(lengths) > MAX_LENGTHS:
            raise OptionError(f"draft lengths {text!r} are too many; at most {MAX_LENGTHS} are run")
    return sorted(lengths)


def make_variants(name: str, config: Any, lengths: list[int]) -> list[Variant]:
    """One for each draft length, named as a user would type it."""
    if not is_dataclass(config) or LENGTH not in {item.name for item in fields(config)}:
        raise OptionError(f"drafter {name!r} has no {LENGTH} to sweep; give one of {listed_drafters()}")
    bare = getattr(config, "model", None) == name or "=" not in name  # a path may have any sign in it
    variants = []
    for length in lengths:
        again: Any = replace(config, **{LENGTH: length})  # type: ignore[type-var]
        variants.append(Variant(f"{name}{':' if bare else ','}{LENGTH}={length}", again, length))
    return variants


@dataclass(frozen=True)
class Best:
    """The draft length with the greatest speed-up in time, and what it is worth."""

    length: int
    speed_up: Estimate
    rivals: list[int]  # lengths whose speed cannot be told from its own

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        said = verdict(f"a draft length of {self.length}", self.speed_up)
        if not self.rivals or not self.speed_up.above_one:
            return said
        return f"{said} {', '.join(map(str, self.rivals))} cannot be told from it."


def verdict(name: str, speed_up: Estimate) -> str:
    """What is said of the fastest."""
    if speed_up.value <= 1:
        return f"Nothing was faster than plain decoding here; {name} lost least, {speed_up}."
    if speed_up.above_one:
        return f"The fastest was {name}: {speed_up}."
    why = (
        "one answer, measured once, proves nothing" if speed_up.low is None else "it cannot be told from plain decoding"
    )
    return f"The fastest in this run was {name}, {speed_up}, but {why}."


def find_best(result: Comparison) -> Best | None:
    """None if no draft length was measured."""
    swept = [measured for measured in result.measured if measured.variant.draft_length is not None]
    if not swept:
        return None
    best = max(swept, key=lambda measured: result.speed_up(measured).value)
    equal = [other for other in swept if other is not best and not estimate_between(other, best).above_one]
    length, *rivals = (int(measured.variant.draft_length or 0) for measured in (best, *equal))
    return Best(length, result.speed_up(best), rivals)


def repeated_share(answers: Iterable[list[int]]) -> float | None:
    """Of all runs of four tokens in the answers, the share that stood in the same answer before.

    Text that goes round in circles is easy to draft, so a speed-up on it says little. None: no run of four.
    """
    total = repeated = 0
    for ids in answers:
        runs = [tuple(ids[start : start + REPEATED]) for start in range(len(ids) - REPEATED + 1)]
        total += len(runs)
        repeated += len(runs) - len(set(runs))
    return repeated / total if total else None
