"""Weights of a config alone: random, the same on every start, made on the device they are for, one tensor at a time.

For measuring: how long a forward takes does not depend on what the weights say. A tensor's values follow from its name,
its shape, its dtype and the kind of device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.kernels.ops import Packed
from paceline.models.weights import Shape, Weights


def random_tensor(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrices that keep what they read about as large as it was; vectors of ones, biases of zeros."""
    if len(shape) < 2:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.is_meta:  # shapes alone
        return made
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    return made.normal_(0.0, shape[-1] ** -0.5, generator=torch.Generator(device).manual_seed(seed))


class DummySource:
    """Stands where weight files would. shapes: of the tensors it holds; `given` are some that are not random."""

    def __init__(
        self,
        label: str,
        shapes: Mapping[str, Shape] | None = None,
        given: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.label, self.files = f"{label} (dummy weights)", list[Path]()
        self._shapes, self._given = dict(shapes or {}), dict(given or {})
        self._dtype, self._device = dtype, device or torch.device("cpu")

    def names(self) -> Collection[str]:
        return self._shapes.keys() | self._given.keys()

    def read(self, name: str) -> Tensor | Packed:
        if name in self._given:
            return self._given[name]
        return random_tensor(name, self._shapes[name], self._dtype, self._device)

    def kind(self, name: str) -> str:
        return "float"

    def release(self) -> None:
        """Nothing is kept."""


class DummyWeights(Weights):
    """Every tensor that a model asks for is there; of those that files may hold or not, none."""

    def _read(self, name: str, shape: Shape) -> Tensor | Packed:
        return random_tensor(self.prefix + name, shape, self.dtype, self.device)
