"""What every model offers: a forward over a packed batch that fills cache layers, and a vocabulary head.

A model writes its forward down once, in the words of `kernels.ops.Forward`; the kernels decide how it is run. Models
know pages, trees and taps only through those words; they know no drafting, sampling or scheduling.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import FINAL, Caches, Forward, Head, Hidden, Inputs, LayerCache, LayerSpec, Weight
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights


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

    def cache_bytes(self, dtype: torch.dtype) -> dict[str, int]:
        """What a token takes in all its cache layers, then what it would take in other forms, each by its name."""
        return {"keys and values": sum(spec.row_bytes for spec in self.layer_specs(dtype))}

    def forward(
        self, batch: Batch, caches: Caches, taps: tuple[int, ...] = (), rows: Tensor | None = None, best: bool = True
    ) -> Hidden:
        """All rows through the layers; with `rows` also the logits of those. best: see `Head`."""
        if taps:
            self._check_taps(taps)
        head = None if rows is None else Head(self.head, rows, best)
        return self.ops.run(self, Inputs(batch.ids, batch.layout), caches, taps, head)

    def first_layers(self, count: int) -> Self:
        """The same model ending after its first layers, then its last norm and its head. Weights are shared, and so is
        what the layers write: they look at the cache layers of the same numbers."""
        short: Any = copy.copy(self)
        short.layers = short.layers[:count]
        short.config = dataclasses.replace(self.config, num_layers=count, windows=self.config.windows[:count])
        result: Self = short
        return result

    def extra_layer(self, weights: Weights) -> Any:
        """A layer as stands behind the last, for a module that is made of one; an error where it lends none."""
        label = weights.source.label
        raise CheckpointError(f"{label} holds modules made of their target's layers, and this target lends none")

    def run_layer(self, f: Forward, layer: Any, x: Any, number: int, window: int | None = None) -> Any:
        """Such a layer, or one of its own, looking at cache layer `number`."""
        raise NotImplementedError

    def key_turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin, as its keys are turned, for a drafter that looks at them; an error where it cannot."""
        kind = self.config.architecture
        raise CheckpointError(f"a GLIDE drafter's target turns its keys by cos and sin; one of type {kind!r} does not")

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        for tap in taps:
            if not FINAL <= tap <= self.config.num_layers:
                raise ValueError(f"tap {tap} is no boundary; allowed: {FINAL} (final) and 0 … {self.config.num_layers}")

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V] float32."""
        return self.ops.logits(hidden, self.head)

    def tap_width(self, boundary: int) -> int:
        """How many values a row has there."""
        return self.head.shape[1] if boundary == FINAL else self.config.hidden_size

    def embed(self, ids: Tensor) -> Tensor:
        return self.ops.embed(self.embedding, ids)


__all__ = ["FINAL", "Hidden", "LayerCache", "Model"]
