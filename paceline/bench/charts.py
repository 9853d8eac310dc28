"""Where the marks of a plot go. Across, in percent, so that a plot is as wide as its page; down, in pixels, so that
its text keeps its size. The page's template draws what is placed here.

Knows numbers and labels. Must not know what they mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

HEIGHT = 200  # pixels, axis to top
ABOVE, BELOW = 9, 17  # pixels from a point to the foot of its value
LEFT, RIGHT = 4.0, 96.0  # percent: the first and the last point's place
MAX_VALUES = 16  # more points than these get no values written at them
CROWDED = 6  # more points than these, on several lines, have room for values on a wide page only


@dataclass(frozen=True)
class Series:
    """A line: its label, its colour and marker by number, its points (x, y)."""

    label: str
    look: int
    points: list[tuple[float, float]]
    bounds: list[tuple[float, float] | None] = field(default_factory=list)  # an interval a point
    hollow: frozenset[float] = frozenset()  # x of points that say little
    form: str = "{:.2f}"


def ticks(high: float, low: float = 0.0, most: int = 6) -> list[float]:
    """Round numbers from `low`, or a little below, to `high`, or a little above."""
    span = max(high - low, 1e-9)
    rough = span / (most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def plot(series: list[Series], up: list[float], form: str, mark: tuple[float, str] | None = None) -> dict[str, Any]:
    """A line plot: `up` are the ticks of the vertical axis, written in `form`; `mark` is a line across and its name."""
    across = sorted({x for one in series for x, _ in one.points})
    place = _Place(across, up)
    shown = [_line(one, place) for one in series]
    if len(across) <= MAX_VALUES:
        _place_values([dot for line in shown for dot in line["dots"]])
    return {
        "height": HEIGHT,
        "up": [(place.down(tick), form.format(tick)) for tick in up],
        "across": [(place.percent(x), f"{x:g}") for x in _thinned(across)],
        "lines": shown,
        "crowded": len(series) > 1 and len(across) > CROWDED,
        "mark": None if mark is None else (place.down(mark[0]), mark[1]),
    }


@dataclass(frozen=True)
class _Place:
    across: list[float]
    up: list[float]

    def percent(self, x: float) -> float:
        first, last = self.across[0], self.across[-1]
        return 50.0 if first == last else round(LEFT + (RIGHT - LEFT) * (x - first) / (last - first), 2)

    def down(self, y: float) -> float:
        low, high = self.up[0], self.up[-1]
        return round(HEIGHT * (1 - (y - low) / (high - low)), 1)


def _line(series: Series, place: _Place) -> dict[str, Any]:
    dots: list[dict[str, Any]] = [
        {
            "x": place.percent(x),
            "y": place.down(y),
            "text": series.form.format(y),
            "value_y": None,
            "hollow": x in series.hollow,
        }
        for x, y in series.points
    ]
    for dot, found in zip_longest(dots, series.bounds):
        dot["ends"] = None if found is None else (place.down(found[1]), place.down(found[0]))
    return {
        "label": series.label,
        "look": series.look,
        "dots": dots,
        "segments": [(a["x"], a["y"], b["x"], b["y"]) for a, b in pairwise(dots)],
    }


def _place_values(dots: list[dict[str, Any]]) -> None:
    """Of points above each other the highest has its value above it, and the lowest below it if there is room."""
    for x in {dot["x"] for dot in dots}:
        column = sorted((dot for dot in dots if dot["x"] == x), key=lambda dot: float(dot["y"]))
        top, bottom = column[0], column[-1]
        top["value_y"] = top["y"] - ABOVE
        if bottom is not top and bottom["y"] + BELOW < HEIGHT:
            bottom["value_y"] = bottom["y"] + BELOW
        elif bottom is not top and bottom["y"] - top["y"] > 2 * BELOW:
            bottom["value_y"] = bottom["y"] - ABOVE


def _thinned(across: list[float], most: int = 16) -> list[float]:
    return across if len(across) <= most else across[:: math.ceil(len(across) / most)]
