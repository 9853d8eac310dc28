"""Float matrices to quantised blocks, at load: int8 (one scale for 32 values) and int4 (a scale and a minimum)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.kernels.blocks import Blocks

GROUP = 32
INT8 = "Q8_0"
METHODS = {"int8": INT8, "weight_only_int8": INT8, "int4": "Q4_1"}


def check_quantization(name: str | None) -> str | None:
    """The block kind for a method's name, or None for none."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in METHODS:
        raise OptionError(f"quantization={name!r} is not known; allowed: {', '.join(METHODS)}")
    return METHODS[name]


def quantise(matrix: Tensor, kind: str) -> Blocks | Tensor:
    """A matrix in blocks; one whose columns are no multiple of 32 stays as it is."""
    rows, columns = matrix.shape
    if columns % GROUP:
        return matrix
    values = matrix.detach().to(torch.float32).contiguous().numpy().reshape(-1, GROUP)
    with np.errstate(invalid="ignore", over="ignore"):  # what is no number has a scale that is none
        raw = _int8(values) if kind == INT8 else _int4(values)
    return Blocks(kind, (rows, columns), np.ascontiguousarray(raw.reshape(rows, -1)))


def _int8(values: Any) -> Any:
    scale = (np.abs(values).max(1, keepdims=True) / 127.0).astype(np.float16)
    inverse = np.divide(1.0, scale.astype(np.float32), out=np.zeros_like(scale, np.float32), where=scale > 0)
    quants = np.clip(np.rint(values * inverse), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=1)


def _int4(values: Any) -> Any:
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    scale, least = ((high - low) / 15.0).astype(np.float16), low.astype(np.float16)
    wide = scale.astype(np.float32)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
    quants = np.clip(np.rint((values - least.astype(np.float32)) * inverse), 0, 15).astype(np.uint8)
    packed = quants[:, :16] | (quants[:, 16:] << 4)
    return np.concatenate([scale.view(np.uint8), least.view(np.uint8), packed], axis=1)
