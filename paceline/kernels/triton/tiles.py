"""Which tile a product is computed in: a rule by shape and rows, and what was measured on this device.

A tile changes no bit. `tune` in `tuning.py` measures; without it the rule here is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels.triton.arithmetic import LANES

PROGRAMS = 128  # a few rows are read by at least so many programs, where the weight has the columns


class Shape(NamedTuple):
    """A product [T, K] → [T, N]."""

    n: int
    k: int
    gate: bool  # the weight has 2N rows
    folded: bool  # an rms norm is made on the way


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4
    group: int = 8  # tiles of rows that programs running together share
    boxes: bool = False  # copied by the device itself (TMA): only many rows, 16 bits, rows at multiples of 16 bytes
    ahead: int = 0  # lines of a weight row asked for before the kernel waits for its rows


measured: dict[tuple[int, Shape, torch.dtype], Tile] = {}  # by bucket of rows


def bucket(rows: int) -> int:
    """Rows that share a tile: up to 16, 32, 64, 128, 256, …"""
    return max(16, 1 << (rows - 1).bit_length())


def find_tile(rows: int, shape: Shape, dtype: torch.dtype) -> Tile:
    return measured.get((bucket(rows), shape, dtype)) or choose(bucket(rows), shape, dtype)


def choose(rows: int, shape: Shape, dtype: torch.dtype) -> Tile:
    """A fair tile for a bucket of rows."""
    if dtype == torch.float32:  # no tensor cores: what threads hold is the limit
        return Tile(16, 32, LANES if shape.folded else 32, stages=2)
    if rows <= 32:
        return _narrow(rows, shape)
    if rows <= 64:
        n = _widest(shape.n, (64, 32, 16) if shape.gate else (128, 64, 32, 16))
        return Tile(64, n, 64 if shape.k % 128 else 128, stages=4 if n * (2 if shape.gate else 1) <= 64 else 3, ahead=4)
    tall = -(-rows // 128)
    n = next((n for n in (256, 128, 64) if tall * -(-shape.n // n) >= PROGRAMS), 32)
    n = n // 2 if shape.gate and n > 64 else n
    return Tile(128, n, 64, warps=8, stages=3 if n > 128 else 4)


def _narrow(rows: int, shape: Shape) -> Tile:
    """Few rows: the weight is read once, as fast as memory allows."""
    n = _widest(shape.n, (32, 16) if shape.gate else (64, 32, 16))
    k = LANES if shape.folded or shape.k < 4096 else 256
    step = (n * (2 if shape.gate else 1) + rows) * k * 2  # bytes
    return Tile(rows, n, k, stages=max(3, min(6, 96 * 1024 // step)), ahead=8)


def _widest(columns: int, allowed: tuple[int, ...]) -> int:
    """The widest that still makes enough programs, else the narrowest."""
    return next((n for n in allowed if columns // n >= PROGRAMS), allowed[-1])
