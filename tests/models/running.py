"""A loaded model run by hand, without an engine."""

from __future__ import annotations

from typing import Any

import torch

from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.models import loader
from paceline.models.batch import Work, pack

CPU = torch.device("cpu")
SINGLY = [*[1] * 8, 6, *[1] * 4, 14, *[1] * 8]  # of 40: the first, some over a page's end, the last


def run(loaded: loader.Loaded, ids: list[int], chunks: list[int], taps: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Logits and tapped states of all positions, the sequence's pages out of order."""
    slots = Slots(2, 64, 8, CPU)
    cache = KVCache(PagePool(16, 16), CPU)
    cache.layers = cache.add_layers(loaded.model.layer_specs(torch.float32))
    slots.begin(1, ids, len(ids))
    slots.pages.write(1, 0, [5, 2, 9])
    logits, tapped, start = [], [], 0
    for count in chunks:
        hidden = loaded.model.forward(pack([Work(1, start, count)], slots, 16), cache.layers, taps)
        logits.append(loaded.model.logits(hidden.final))
        tapped.append(hidden.tapped)
        start += count
    return torch.cat(logits), torch.cat(tapped) if taps else None
