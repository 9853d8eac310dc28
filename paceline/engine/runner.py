"""The target's forward: a batch in, logits of the rows that matter and tapped states out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import Taps
from paceline.models.base import Model
from paceline.models.batch import Batch


@dataclass
class Forwarded:
    logits: Tensor  # [R, V] float32, of the rows asked for
    tapped: Tensor | None  # [T, H·taps], of all rows
    best: Tensor | None  # [R] the likeliest token of each row, where the kernels know it


class Runner:
    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    def forward(self, batch: Batch, taps: Taps, rows: Tensor) -> Forwarded:
        hidden = self.model.forward(batch, self.cache.layers, taps.hidden, rows)
        assert hidden.logits is not None
        return Forwarded(hidden.logits, hidden.tapped, hidden.best)
