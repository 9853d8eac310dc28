"""Pages of layers that look back only so far, without an engine."""

from __future__ import annotations

import pytest
import torch

from paceline.cache.pages import Key, PagePool
from paceline.cache.slots import Slots
from paceline.cache.windowed import WindowPages

SIZE, WIDTH = 4, 6


def make(num_pages: int = 20, width: int = WIDTH) -> WindowPages:
    return WindowPages(Slots(3, 80, 20, torch.device("cpu")), PagePool(num_pages, SIZE), width)


def keys(count: int) -> list[Key]:
    return [bytes([number]) for number in range(count)]


@pytest.mark.parametrize(
    ("computed", "first"),
    [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2), (40, 8)],  # a row at 9 sees positions 4 … 9
)
def test_a_page_is_given_back_when_no_row_to_come_sees_any_of_it(computed: int, first: int) -> None:
    windowed = make()
    assert windowed.enter(0, [], 41)
    assert windowed.reach(0, computed, 41)
    held = windowed.held[0]
    assert held.first == first and held.end == 11
    assert windowed.pool.num_available == 20 - 11 + first
    windowed.check()


def test_a_sequence_that_grows_holds_as_much_as_it_sees() -> None:
    windowed = make(num_pages=3)
    assert windowed.enter(1, [], 1)
    for computed in range(79):
        assert windowed.reach(1, computed, computed + 1)
        assert len(windowed.held[1].pages) <= 3
        windowed.check()
    windowed.leave(1)
    assert windowed.pool.num_available == 3 and not windowed.held


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ([0, 1, 2, 3, 4, 5], 6),
        ([4, 5], 6),  # a row at 24 sees positions 19 … 24
        ([5], 0),
        ([2, 3, 5], 4),
        ([0, 3, 5], 1),
        ([0, 1, 5], 2),
        ([1, 3, 5], 0),
        ([], 0),
    ],
)
def test_a_hit_needs_the_pages_that_the_row_behind_it_sees(there: list[int], found: int) -> None:
    windowed = make()
    for number, page in zip(there, windowed.pool.take(len(there)) or []):
        windowed.pool.publish(page, keys(6)[number])
        windowed.pool.release([page])
    assert windowed.find(keys(6)) == found
    assert windowed.enter(0, keys(found), found * SIZE + 1)
    held = windowed.held[0]
    assert [windowed.pool.lookup(key) for key in keys(found)[held.first :]] == held.pages[:-1]
    windowed.check()


def test_where_pages_run_out_nothing_is_taken() -> None:
    windowed = make(num_pages=4)
    assert windowed.has_room(16, 40) and not windowed.has_room(17, 40) and not windowed.has_room(80, 3)
    assert windowed.enter(0, [], 9)
    assert windowed.has_room(4, 40) and not windowed.has_room(5, 1)
    assert not windowed.reach(0, 8, 40), "what is there stays"
    assert windowed.held[0].end == 3
    windowed.check()
    windowed.reset()
    assert windowed.pool.num_available == 4 and not windowed.held


def test_a_page_given_back_is_found_by_its_key_and_is_page_zero_in_the_table() -> None:
    windowed = make()
    assert windowed.enter(0, [], 30)
    for number, key in enumerate(keys(7)):
        windowed.publish(0, number, key)
    windowed.reach(0, 28, 30)
    assert windowed.table.host[0, :6].tolist()[:5] == [0] * 5 and windowed.table.host[0, 5] > 0
    assert all(windowed.pool.lookup(key) for key in keys(7))
    assert windowed.enter(1, keys(7), 29)
    assert windowed.held[1].pages[:2] == windowed.held[0].pages[:2], "what both see is shared"
    windowed.check()
