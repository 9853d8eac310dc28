"""Matrices kept as 8-bit floats with a scale for each block of rows and columns, as DeepSeek publishes them.

The scales of `X.weight` are `X.weight_scale_inv`, which in spite of the name multiply. Such a checkpoint is known by
its config; everything about activations there is for kernels that compute in 8 bits, and means nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.models.config import is_whole

SUFFIX = "_scale_inv"
Block = tuple[int, int]


def find_block(values: Any) -> Block | None:
    """Rows and columns of a block by a config's `quantization_config`; None: it is none of these."""
    given: dict[str, Any] = values if isinstance(values, dict) else getattr(values, "__dict__", {})
    method = given.get("quant_method")
    size, scheme = given.get("weight_block_size"), given.get("activation_scheme", "dynamic")
    if getattr(method, "value", method) != "fp8" or given.get("fmt", "e4m3") != "e4m3" or scheme != "dynamic":
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(is_whole(n) and n > 0 for n in size):
        return None
    return size[0], size[1]


class Scales:
    """What a source holds besides its tensors: the scales of some of them."""

    def __init__(self, names: Collection[str], block: Block | None, label: str) -> None:
        self.block, self.label = block, label
        self.names = {name for name in names if block is not None and name.endswith(SUFFIX)}

    def scaled(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """A tensor as it was before it was put into 8 bits, if it was; `read` reads by name."""
        tensor, scales = read(name), f"{name}{SUFFIX}"
        if scales not in self.names:
            return tensor
        assert self.block is not None
        if tensor.dtype != torch.float8_e4m3fn:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.label} holds {scales}, but {name} is {kind}; allowed: float8_e4m3fn")
        found = read(scales)
        wanted = [*tensor.shape[:-2], *(-(-size // step) for size, step in zip(tensor.shape[-2:], self.block))]
        if list(found.shape) != wanted:
            raise CheckpointError(
                f"{self.label}: {scales} has shape {list(found.shape)}, but blocks of "
                f"{self.block[0]} x {self.block[1]} make it {wanted}"
            )
        return dequantise(tensor, found, self.block)


def dequantise(matrix: Tensor, scales: Tensor, block: Block) -> Tensor:
    """float32; the last blocks of rows and of columns may be cut short."""
    rows, columns = matrix.shape[-2:]
    tall = scales.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return matrix.float() * tall.repeat_interleave(block[1], dim=-1)[..., :columns]
