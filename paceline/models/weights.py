"""Reading named tensors: every one a model needs is found and has the right shape, every one left over is reported.

A `Source` answers names in Hugging Face spelling, whatever the file; `Weights` is a view of it under a prefix that cuts
for this rank while reading and converts to the model's dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.models.layers.linear import Shard, VocabularyParallel

Shape = tuple[int, ...]


class Source(Protocol):
    """Where tensors come from."""

    label: str  # the file or folder, for error messages

    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor: ...


class Weights:
    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, shard: Shard | None = None) -> None:
        self.source, self.dtype, self.device = source, dtype, device
        self.shard = shard or Shard()

        self.prefix = ""
        self.used: set[str] = set()
        self.progress: Callable[[], None] | None = None

    def under(self, prefix: str) -> Weights:
        view = Weights.__new__(Weights)
        view.__dict__.update(self.__dict__)
        view.prefix = self.prefix + prefix
        return view

    def has(self, name: str) -> bool:
        return self.prefix + name in self.source.names()

    def unused(self) -> list[str]:
        return sorted(set(self.source.names()) - self.used)

    def whole(self, name: str, shape: Shape) -> Tensor:
        return self._read(name, shape).to(self.device, self.dtype).contiguous()

    def transposed(self, name: str, shape: Shape) -> Tensor:
        """A matrix stored [in, out]; `shape` is [out, in]."""
        return self._read(name, shape[::-1]).t().to(self.device, self.dtype).contiguous()

    def rows(self, names: list[str], shapes: list[Shape]) -> Tensor:
        """This rank's rows of each, fused into one."""
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            parts.append(self._read(name, shape)[self.shard.part(shape[0])].to(self.device, self.dtype))
        return torch.cat(parts).contiguous()

    def columns(self, name: str, shape: Shape) -> Tensor:
        part = self._read(name, shape)[:, self.shard.part(shape[1])]
        return part.to(self.device, self.dtype).contiguous()

    def head(self, embedding: VocabularyParallel, name: str, tied: bool) -> VocabularyParallel:
        """The vocabulary head: the embedding again when tied (a stored copy must then be the same size)."""
        if tied:
            if self.has(name):
                self.used.add(self.prefix + name)
            return embedding
        return VocabularyParallel(embedding.ops, self.rows([name], [embedding.weight.shape]))

    def _read(self, name: str, shape: Shape) -> Tensor:
        full = self.prefix + name
        if full not in self.source.names():
            raise CheckpointError(f"{self.source.label} lacks the tensor {full}, which this model needs")
        self.used.add(full)
        tensor = self.source.read(full)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.source.label}: tensor {full} has shape {list(tensor.shape)}, but the config "
                f"makes it {list(shape)}"
            )
        if self.progress is not None:
            self.progress()
        return tensor
