"""What a captured round reads outlives the caches that made it."""

from __future__ import annotations

import gc
import weakref

import torch

from paceline.kernels.held import hold, holding
from paceline.models.batch import _places_of, places_of


def test_what_is_asked_for_while_a_round_is_captured_is_held_and_nothing_else() -> None:
    device = torch.device("cpu")
    before = places_of(((1, 0),), 1, 0, device)
    with holding() as held:
        inside = places_of(((1, 3),), 1, 3, device)
        with holding() as deeper:
            hold(1)
    assert held == [inside] and deeper == [1] and before not in held
    there = weakref.ref(inside)
    _places_of.cache_clear()
    del inside
    gc.collect()
    assert there() is not None, "a captured round would read memory that somebody else has"
    held.clear()
    gc.collect()
    assert there() is None
    assert hold(2) == 2 and held == []
