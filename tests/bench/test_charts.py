"""Where the marks of a plot go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.charts import HEIGHT, MAX_VALUES, Series, plot, ticks


@pytest.mark.parametrize(
    ("high", "low", "expected"),
    [
        (1.0, 0.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.99, 0.0, [0, 1, 2, 3]),
        (1.31, 0.93, [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]),
        (30.0, 1.0, [0, 10, 20, 30]),
    ],
)
def test_ticks_are_round_numbers(high: float, low: float, expected: list[float]) -> None:
    assert ticks(high, low) == pytest.approx(expected)


@given(st.floats(0, 1e4), st.floats(1e-3, 1e4))
def test_ticks_hold_what_they_are_for_and_are_few(low: float, span: float) -> None:
    found = ticks(low + span, low)
    assert found[0] <= low + 1e-6 * span
    assert found[-1] >= (low + span) * (1 - 1e-9)
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


def test_points_are_placed_in_percent_across_and_pixels_down() -> None:
    drawn = plot([Series("a", 1, [(1, 0.0), (2, 1.0), (3, 2.0)])], [0, 1, 2], "{:g}×", (1.0, "one"))
    dots = drawn["lines"][0]["dots"]
    assert [dot["x"] for dot in dots] == [4.0, 50.0, 96.0]
    assert [dot["y"] for dot in dots] == [HEIGHT, HEIGHT / 2, 0]
    assert drawn["lines"][0]["segments"] == [(4.0, HEIGHT, 50.0, HEIGHT / 2), (50.0, HEIGHT / 2, 96.0, 0)]
    assert drawn["up"] == [(HEIGHT, "0×"), (HEIGHT / 2, "1×"), (0, "2×")]
    assert drawn["across"] == [(4.0, "1"), (50.0, "2"), (96.0, "3")]
    assert drawn["mark"] == (HEIGHT / 2, "one")


def test_a_single_point_stands_in_the_middle() -> None:
    drawn = plot([Series("a", 1, [(5, 1.0)])], [0, 2], "{:g}")
    assert drawn["across"] == [(50.0, "5")]
    assert drawn["lines"][0]["segments"] == []


def test_intervals_are_placed_like_points() -> None:
    (line,) = plot([Series("a", 1, [(1, 1.0), (2, 1.0)], [(0.5, 1.5), None])], [0, 2], "{:g}")["lines"]
    assert [dot["ends"] for dot in line["dots"]] == [(HEIGHT / 4, 3 * HEIGHT / 4), None]


def test_of_points_above_each_other_the_ends_have_values_on_their_outer_sides() -> None:
    lines = plot(
        [Series(name, 1, [(1, value)]) for name, value in (("a", 1.0), ("b", 3.0), ("c", 2.0))], [0, 4], "{:g}"
    )
    low, high, middle = (line["dots"][0] for line in lines["lines"])
    assert low["value_y"] > low["y"]
    assert high["value_y"] < high["y"]
    assert middle["value_y"] is None


@pytest.mark.parametrize(("high", "low", "placed"), [(1.0, 0.5, True), (1.0, 0.0, True), (0.1, 0.0, False)])
def test_a_value_runs_neither_into_the_axis_nor_into_another(high: float, low: float, placed: bool) -> None:
    lines = plot([Series("a", 1, [(1, low)]), Series("b", 2, [(1, high)])], [0, 1], "{:g}")["lines"]
    bottom, top = (line["dots"][0]["value_y"] for line in lines)
    assert (bottom is not None) == placed
    assert bottom is None or (bottom < HEIGHT and bottom - top > 15)


def test_a_plot_with_too_many_points_has_no_values_and_fewer_ticks() -> None:
    points = [(float(x), 1.0) for x in range(1, 65)]
    drawn = plot([Series("a", 1, points)], [0, 1], "{:g}")
    assert len(points) > MAX_VALUES
    assert all(dot["value_y"] is None for dot in drawn["lines"][0]["dots"])
    assert len(drawn["across"]) <= 16
