"""What every model offers: a forward over a packed batch that fills cache layers, and a vocabulary head.

Models know pages, trees and taps; they know no drafting, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.kernels import Ops
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig

FINAL = -1  # the tap after the last norm

LayerCache = tuple[Tensor, Tensor]  # keys and values, each [cache rows, kv heads, D]


@dataclass
class Hidden:
    """A forward's result: the head's input for every row, and the boundaries that were tapped."""

    final: Tensor  # [T, H] after the last norm
    tapped: Tensor | None  # [T, H·taps] in the order asked for


class Model(Protocol):
    config: ModelConfig

    def forward(self, batch: Batch, caches: SequenceOf[LayerCache], taps: tuple[int, ...] = ()) -> Hidden: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def embed(self, ids: Tensor) -> Tensor: ...


class Recorder:
    """Collects the residual stream at the boundaries asked for."""

    def __init__(self, taps: tuple[int, ...], num_layers: int) -> None:
        for tap in taps:
            if not FINAL <= tap <= num_layers:
                raise ValueError(f"tap {tap} is not a boundary; allowed: {FINAL} (final) and 0 … {num_layers}")
        self.taps = taps
        self.states: dict[int, Tensor] = {}

    def at(self, boundary: int, state: Tensor) -> None:
        if boundary in self.taps:
            self.states[boundary] = state

    def finish(self, final: Tensor) -> Hidden:
        self.states[FINAL] = final
        tapped = torch.cat([self.states[tap] for tap in self.taps], dim=-1) if self.taps else None
        return Hidden(final, tapped)


class Plans:
    """Attention plans of one forward, one per window width."""

    def __init__(self, ops: Ops, config: ModelConfig, batch: Batch) -> None:
        self._ops, self._config, self._batch = ops, config, batch
        self._made: dict[int | None, Any] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        """Store this batch's keys and values, then let every row look at what it may see."""
        config, layout = self._config, self._batch.layout
        window = config.window(layer)
        if window not in self._made:
            self._made[window] = self._ops.plan(layout, config.num_heads, config.num_kv_heads, window)
        keys, values = cache
        keys.index_copy_(0, layout.write, key.to(keys.dtype))
        values.index_copy_(0, layout.write, value.to(values.dtype))
        out = self._ops.attention(query, keys, values, self._made[window], config.head_dim**-0.5)
        return out.reshape(out.shape[0], -1)
