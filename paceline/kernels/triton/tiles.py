"""Which tile a product is computed in: a rule by shape and rows, and what was measured on this device.

A tile changes no bit. `tune` in `tuning.py` measures; without it the rule here is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels.triton.arithmetic import LANES

PROGRAMS = 128  # that fill a device
ROOM = 96 * 1024  # bytes of shared memory: two programs to a processor


class Shape(NamedTuple):
    """A product [T, K] → [T, N]."""

    n: int
    k: int
    gate: bool  # the weight has 2N rows
    normed: bool  # an rms norm stands in front

    @property
    def halves(self) -> int:
        return 2 if self.gate else 1


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4
    group: int = 8  # tiles of rows that programs running together share
    boxes: bool = False  # copied by the device itself (TMA): only many rows, 16 bits, rows at multiples of 16 bytes
    folded: bool = False  # a norm is made on the way, not by a kernel of its own: the same bits
    ahead: int = 0  # lines of a weight row asked for before the kernel waits for its rows


measured: dict[tuple[int, Shape, torch.dtype], Tile] = {}  # by bucket of rows


def bucket(rows: int) -> int:
    """Rows that share a tile: up to 16, 32, 64, 128, 256, …"""
    return max(16, 1 << (rows - 1).bit_length())


def find_tile(rows: int, shape: Shape, dtype: torch.dtype) -> Tile:
    """What was measured, for the product alone if not with its norm; else the rule's."""
    count, alone = bucket(rows), shape._replace(normed=False)
    found = measured.get((count, shape, dtype)) or measured.get((count, alone, dtype))
    return found or choose(count, shape, dtype)


def choose(rows: int, shape: Shape, dtype: torch.dtype) -> Tile:
    """A fair tile for a bucket of rows: the largest that leaves enough programs to fill the device."""
    if dtype == torch.float32:  # no tensor cores: what threads hold is the limit
        return Tile(16, 32, 32, stages=2)
    sizes = areas(rows, shape)
    full = [size for size in sizes if count_programs(rows, shape, size) >= PROGRAMS]
    if full:
        m, n = max(full, key=lambda size: (size[0] * size[1], -sum(size), size[0]))
    else:
        m, n = max(sizes, key=lambda size: (count_programs(rows, shape, size), size[0] * size[1]))
    k = depth_of(m, n, shape)
    if m > 64:
        return Tile(m, n, k, warps=8, stages=3 if n * shape.halves > 128 else 4)
    return Tile(m, n, k, stages=max(3, min(6, ROOM // bytes_of(m, n, k, shape))), ahead=8)


def areas(rows: int, shape: Shape) -> list[tuple[int, int]]:
    """Tiles' rows and columns that make sense: none much taller than there are rows, sums that fit into registers."""
    widest = {16: 64, 32: 128, 64: 256, 128: 256}
    return [
        (m, n)
        for m in (16, 32, 64, 128)
        for n in (8, 16, 32, 64, 128, 256)
        if m <= max(rows, 16) and n * shape.halves <= widest[m] and (n > 8 or m <= 32)
    ]


def count_programs(rows: int, shape: Shape, size: tuple[int, int]) -> int:
    return -(-rows // size[0]) * -(-shape.n // size[1])


def depth_of(m: int, n: int, shape: Shape) -> int:
    """Columns of x in a step. Few rows wait for memory, and larger steps ask for more of it at once."""
    if m > 64 or (m == 64 and (n > 64 or shape.k % 128)):
        return 64
    return LANES if m == 64 or shape.k < 4096 or n > 32 else 256


def bytes_of(m: int, n: int, k: int, shape: Shape) -> int:
    """Of one step's rows and weights."""
    return (m + n * shape.halves) * k * 2
