"""What every model offers: a forward over a packed batch that fills cache layers, and a vocabulary head.

A model writes its forward down once, in the words of `kernels.ops.Forward`; the kernels decide how it is run. Models
know pages, trees and taps only through those words; they know no drafting, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels import Ops
from paceline.kernels.ops import FINAL, Forward, Head, Hidden, Inputs, LayerCache, LayerSpec, Weight
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig


class Model:
    """The common part: subclasses load their weights and say what a forward is."""

    config: ModelConfig
    ops: Ops
    embedding: Weight
    head: Weight

    def describe(self, f: Forward) -> Any:
        """One forward: from f.embed to the last norm, f.tap at every boundary."""
        raise NotImplementedError

    def layer_specs(self, dtype: torch.dtype) -> list[LayerSpec]:
        """The cache layers it looks at, in the order it numbers them."""
        shape = self.config
        return [
            LayerSpec.kv(shape.num_kv_heads, shape.head_dim, dtype, shape.window(layer))
            for layer in range(shape.num_layers)
        ]

    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: tuple[int, ...] = (), rows: Tensor | None = None
    ) -> Hidden:
        """All rows through the layers; with `rows` also the logits of those."""
        for tap in taps:
            if not FINAL <= tap <= self.config.num_layers:
                raise ValueError(f"tap {tap} is no boundary; allowed: {FINAL} (final) and 0 … {self.config.num_layers}")
        head = None if rows is None else Head(self.head, rows)
        return self.ops.run(self, Inputs(batch.ids, batch.layout), caches, taps, head)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V] float32."""
        return self.ops.logits(hidden, self.head)

    def tap_width(self, boundary: int) -> int:
        """How many values a row has there."""
        return self.head.shape[1] if boundary == FINAL else self.config.hidden_size

    def embed(self, ids: Tensor) -> Tensor:
        return self.ops.embed(self.embedding, ids)


__all__ = ["FINAL", "Hidden", "LayerCache", "Model"]
