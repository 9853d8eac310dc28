"""Randomness that depends on nothing but its key.

Key: (seed, sample index, position, stream, extra). From a key and a token id integer hashing makes 32 bits, and from
those comes a Gumbel value by additions and multiplications of float64 alone, which every device rounds alike and no
vectorised loop treats differently at its end. So a row's noise is the same on a CPU and a GPU, alone or in a batch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cpu.library import KeysStruct, library

SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)  # streams

_MASK = 0xFFFFFFFF
_TABLE_BITS = 12


@dataclass
class Keys:
    """One key per row, before position and stream."""

    seeds: Tensor  # [R] int64, all 64 bits
    samples: Tensor  # [R]


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (two multiply-xorshift rounds) in int64 arithmetic, which wraps the same everywhere."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def row_words(keys: Keys, positions: Tensor, stream: int, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two 32-bit words a row: the same parts mixed from two starting points."""
    parts = [
        keys.seeds & _MASK,
        (keys.seeds >> 32) & _MASK,
        keys.samples,
        positions,
        torch.full_like(positions, stream),
    ]
    if extra is not None:
        parts.append(extra)
    words = []
    for start in (0x9E3779B9, 0x3C6EF372):
        word = torch.full_like(positions, start)
        for index, part in enumerate(parts):
            word = _mix((word ^ (part & _MASK)) + (index + 1) * 0x85EBCA6B & _MASK)
        words.append(word)
    return words[0], words[1]


def bits(keys: Keys, positions: Tensor, stream: int, tokens: Tensor, extra: Tensor | None = None) -> Tensor:
    """[R] keys × [V] or [R, V] token ids → [R, V] integers of 32 bits."""
    first, second = row_words(keys, positions, stream, extra)
    return _mix((_mix(tokens ^ first[:, None]) + second[:, None]) & _MASK)


def uniform(keys: Keys, positions: Tensor, stream: int, extra: Tensor | None = None) -> Tensor:
    """[R] float64 in the open interval (0, 1)."""
    zero = torch.zeros(1, dtype=torch.int64, device=positions.device)
    return _unit(bits(keys, positions, stream, zero, extra))[:, 0]


def gumbel(keys: Keys, positions: Tensor, stream: int, vocab_size: int, extra: Tensor | None = None) -> Tensor:
    """[R, V] float32 Gumbel noise, keyed by token id; on a CPU by the native library, where built: the same bits."""
    native = library() if positions.device.type == "cpu" else None
    if native is not None:
        parts = [keys.seeds, keys.samples, positions, extra, *tables(positions.device)]
        held = [None if part is None else part.contiguous() for part in parts]
        struct = KeysStruct(None, *(None if part is None else part.data_ptr() for part in held), stream)
        out = torch.empty((len(positions), vocab_size), dtype=torch.float32, device="cpu")
        native.paceline_gumbel(struct, *out.shape, out.data_ptr())
        return out
    return _gumbel(keys, positions, stream, vocab_size, extra)


def _gumbel(keys: Keys, positions: Tensor, stream: int, vocab_size: int, extra: Tensor | None = None) -> Tensor:
    """The same in tensor operations, for every device."""
    tokens = torch.arange(vocab_size, device=positions.device)
    exponential = -_log(_unit(bits(keys, positions, stream, tokens, extra)))
    return (-_log(exponential)).float()


def _unit(integers: Tensor) -> Tensor:
    return (integers.double() + 0.5) * 2.0**-32


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """1/c and log c for the middle c of each of 4096 intervals of [1, 2)."""
    centres = [1 + (index + 0.5) / 2**_TABLE_BITS for index in range(2**_TABLE_BITS)]
    inverse = torch.tensor([1 / c for c in centres], dtype=torch.float64)
    logarithm = torch.tensor([math.log(c) for c in centres], dtype=torch.float64)
    return inverse.to(device), logarithm.to(device)


def _log(x: Tensor) -> Tensor:
    """log of positive normal float64 by table and cubic: |error| below 1e-13, equal bits on every device."""
    inverse, logarithm = tables(x.device)
    raw = x.view(torch.int64)
    exponent = ((raw >> 52) - 1023).double()
    index = (raw >> (52 - _TABLE_BITS)) & (2**_TABLE_BITS - 1)
    mantissa = ((raw & (2**52 - 1)) | (1023 << 52)).view(torch.float64)
    rest = mantissa * inverse[index] - 1.0
    series = rest * (1.0 - rest * (0.5 - rest * (1.0 / 3.0)))
    return exponent * math.log(2) + (logarithm[index] + series)
