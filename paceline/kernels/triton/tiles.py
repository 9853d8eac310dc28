"""Which tile a product is computed in: a rule by shape and rows, and what was measured on this device.

A tile changes no bit, but for weights of 8 bits (see `product.py`). `tune` in `tuning.py` measures; without it
the rule here is used.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.kernels.triton.arithmetic import LANES

PROGRAMS, FEWER_PROGRAMS = 128, 72  # that fill a device: by what they read, and by what they compute
# Bytes of shared memory for a program, by how many there are: one to a processor, two, three.
ROOMS = (132, 200 * 1024), (264, 110 * 1024), (sys.maxsize, 64 * 1024)


class Shape(NamedTuple):
    """A product [T, K] → [T, N]."""

    n: int
    k: int
    gate: bool  # the weight has 2N rows
    normed: bool  # an rms norm stands in front
    packed: bool = False  # the weight has 8 bits

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
    boxes: bool = False  # copied by the device itself (TMA): only 8 or 16 bits, rows at multiples of 16 bytes
    turned: bool = False  # of boxes: a tensor core's 64 rows are the weight's, its columns (8 or more) are x's
    lasting: bool = False  # of boxes: as many programs as processors, each with tile after tile
    ahead: int = 0  # lines of a weight row asked for before the kernel waits for its rows
    parts: int = 1  # of a sum and of a step's columns, each a warp's: of weights of 8 bits alone, and no boxes


Key = tuple[int, Shape, torch.dtype]  # a bucket of rows, and what is multiplied

measured: dict[Key, Tile] = {}
library: dict[Key, bool] = {}  # whether PyTorch's was the faster, if it may be used at all


def bucket(rows: int) -> int:
    """Rows that share a tile: up to 16, 32, 64, 128, 256, …"""
    return max(16, 1 << (rows - 1).bit_length())


def find_tile(rows: int, shape: Shape, dtype: torch.dtype) -> Tile:
    """What was measured, for the product alone if not with its norm, of floats if not packed; else the rule's."""
    count = bucket(rows)
    found = _measured(count, shape, dtype)
    if found is None and shape.packed:
        found = _measured(count, shape._replace(packed=False), dtype)
        found = found if found is not None and suits_packed(found) else None
    return found or choose(count, shape, dtype)


def _measured(count: int, shape: Shape, dtype: torch.dtype) -> Tile | None:
    return measured.get((count, shape, dtype)) or measured.get((count, shape._replace(normed=False), dtype))


def suits_packed(tile: Tile) -> bool:
    """Whether widened values go into a tensor core from registers: its left side's, or both of one of few rows."""
    return tile.turned or (not tile.boxes and tile.m <= 32)


def prefers_library(rows: int, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether a product that need not be exact is PyTorch's: as was measured, else where rows are many."""
    found = library.get((bucket(rows), shape, dtype))
    return rows >= (512 if shape.gate else 32) if found is None else found


@functools.cache
def choose(rows: int, shape: Shape, dtype: torch.dtype) -> Tile:
    """A fair tile for a bucket of rows: the largest that leaves enough programs to fill the device."""
    if dtype == torch.float32:  # no tensor cores: what threads hold is the limit
        return Tile(16, 32, 32, stages=2)
    sizes = areas(rows, shape)
    full = [size for size in sizes if count_programs(rows, shape, size) >= _enough(rows, size[1])]
    if full:
        m, n = max(full, key=lambda size: (size[0] * size[1], -sum(size), size[0]))
    else:
        m, n = max(sizes, key=lambda size: (count_programs(rows, shape, size), size[0] * size[1]))
    k = depth_of(m, n, shape)
    if shape.packed and m > 32:
        return Tile(m, n, k, warps=8 if n >= 128 else 4, stages=4, boxes=True, turned=True)
    if m > 64:
        return Tile(m, n, k, warps=8, stages=4, boxes=True)
    programs = count_programs(rows, shape, (m, n))
    room = next(size for most, size in ROOMS if programs <= most)
    return Tile(m, n, k, stages=max(3, stages_in(room, m, n, k, shape)), ahead=4)


def _enough(rows: int, columns: int) -> int:
    """Few rows wait for memory, and want all processors to ask for it; narrow tiles are small enough already."""
    return PROGRAMS if rows <= 32 and columns > 16 else FEWER_PROGRAMS


def areas(rows: int, shape: Shape) -> list[tuple[int, int]]:
    """Tiles' rows and columns that make sense: none taller than there are rows, sums that fit into registers."""
    widest = {16: 64, 32: 128, 64: 256, 128: 256, 256: 128}
    return [
        (m, n)
        for m in (16, 32, 64, 128, 256)
        for n in (8, 16, 32, 64, 128, 256)
        if m <= rows
        and n * shape.halves <= widest[m]
        and (n > 8 or m <= 32)
        and (n > 32 or m <= 64)
        and (n <= 128 or m > 64)
        and (not shape.packed or m <= 32 or (n >= 64 and m * n * shape.halves <= 2**14))
    ]


def count_programs(rows: int, shape: Shape, size: tuple[int, int]) -> int:
    return -(-rows // size[0]) * -(-shape.n // size[1])


def depth_of(m: int, n: int, shape: Shape) -> int:
    """Columns of x in a step: 128 where they fit four times over and divide the sum."""
    wide = n * shape.halves
    if shape.packed and m * wide <= 2048 and shape.k % (2 * LANES) == 0:
        return 2 * LANES  # more of a weight's row, which has half the bytes
    if shape.packed:
        return LANES if m <= 64 else 64
    return 64 if (m > 64 and wide > 64) or (m == 64 and (wide > 64 or shape.k % LANES)) else LANES


def stages_in(room: int, m: int, n: int, k: int, shape: Shape) -> int:
    """As deep as the room allows, and no deeper than there are steps: the next kernel needs room too."""
    return min(8, -(-shape.k // k) + 1, room // bytes_of(m, n, k, shape))


def bytes_of(m: int, n: int, k: int, shape: Shape) -> int:
    """Of one step's rows and weights."""
    return (m * 2 + n * shape.halves * (1 if shape.packed else 2)) * k
