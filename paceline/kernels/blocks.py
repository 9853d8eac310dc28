"""Quantised blocks: how many values and bytes a block of each kind has, and the arithmetic that unpacks it.

Knows nothing of files: GGUF files keep their tensors in these blocks, and `quantise` makes some of them at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Decoder = Callable[[Bytes], NDArray[Any]]

# Kind → (elements, bytes) of a block; plain numbers are blocks of one.
# fmt: off
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q8_0": (32, 34), "Q8_1": (32, 40), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98), "IQ1_S": (256, 50), "IQ4_NL": (32, 18), "IQ3_S": (256, 110), "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136), "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8), "F64": (1, 8),
    "IQ1_M": (256, 56), "BF16": (1, 2), "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
    "NVFP4": (64, 36), "Q1_0": (128, 18),
}
# fmt: on
_CHUNK_ELEMENTS = 1 << 22  # decoded at a time, so that unpacking scratch stays small beside the result


@dataclass(frozen=True, eq=False)
class Blocks:
    """A tensor in blocks of one kind: `raw` is [rows, bytes per row]."""

    kind: str
    shape: tuple[int, ...]
    raw: Bytes = field(repr=False)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, computed in float32 (plain kinds: as stored) and cast to `dtype`, in memory of their own."""
        decode, (elements, size) = DECODERS[self.kind], BLOCKS[self.kind]
        blocks = self.raw.reshape(-1, size)
        out = torch.empty(len(blocks) * elements, dtype=dtype, device="cpu")
        step = max(1, _CHUNK_ELEMENTS // elements)
        with np.errstate(all="ignore"):  # a damaged scale may be infinite; that is the file's value, not a fault here
            for start in range(0, len(blocks), step):
                values = decode(np.ascontiguousarray(blocks[start : start + step])).reshape(-1)
                begin = start * elements
                out[begin : begin + values.size] = torch.from_numpy(values)
        return out.reshape(self.shape)

    def part(self, number: int) -> Self:
        """One matrix of a stack [count, rows, columns], nothing unpacked."""
        rows = self.shape[1]
        return replace(self, shape=self.shape[1:], raw=self.raw[number * rows : (number + 1) * rows])


def _f16(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """The half at byte `at` of every block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """Each `group` bytes hold the low nibbles of `group` elements, then their high nibbles the next `group`."""
    split = packed.reshape(len(packed), -1, 1, group) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (split & np.uint8(15)).reshape(len(packed), -1)


def _planes(packed: Bytes, group: int, bits: int) -> Bytes:
    """Each `group` bytes hold 8/bits planes, lowest bits first, of `group` elements each."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return ((packed.reshape(len(packed), -1, 1, group) >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of a little-endian 32-bit word is bit 4 of element i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> NDArray[Any]:
    return _f16(b, 0) * (_nibbles(b[:, 2:], 16).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(b: Bytes) -> NDArray[Any]:
    return _f16(b, 0) * _nibbles(b[:, 4:], 16).astype(np.float32) + _f16(b, 2)


def _q5_0(b: Bytes) -> NDArray[Any]:
    q = (_nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6])).astype(np.int8) - np.int8(16)
    return _f16(b, 0) * q.astype(np.float32)


def _q5_1(b: Bytes) -> NDArray[Any]:
    q = _nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8])
    return _f16(b, 0) * q.astype(np.float32) + _f16(b, 2)


def _q8_0(b: Bytes) -> NDArray[Any]:
    return _f16(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _scaled(q: NDArray[Any], scale: NDArray[Any], minimum: NDArray[Any] | None = None) -> NDArray[Any]:
    """q * scale - minimum, with one scale (and minimum) for each equal run of a super-block's elements."""
    runs = q.astype(np.float32).reshape(len(q), scale.shape[1], -1) * scale[:, :, None]
    if minimum is not None:
        runs -= minimum[:, :, None]
    packed: NDArray[Any] = runs.reshape(len(q), -1)
    return packed


def _six_bit_pairs(s: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight 6-bit scales and eight 6-bit minimums out of 12 bytes (Q4_K and Q5_K)."""
    low, high, last = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.concatenate([low & 63, (last & 15) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([high & 63, (last >> 4) | ((high >> 6) << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _q2_k(b: Bytes) -> NDArray[Any]:
    q = _planes(b[:, 16:80], 32, 2)
    scale, minimum = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    return _scaled(q, _f16(b, 80) * scale, _f16(b, 82) * minimum)


def _q3_k(b: Bytes) -> NDArray[Any]:
    # The mask holds the third bit, and a clear bit means minus four.
    q = (_planes(b[:, 32:96], 32, 2) | (_planes(b[:, :32], 32, 1) << 2)).astype(np.int8) - np.int8(4)
    s = b[:, 96:108]
    scale = (_nibbles(s[:, :8], 8) | (_planes(s[:, 8:], 4, 2) << 4)).astype(np.int8) - np.int8(32)
    return _scaled(q, _f16(b, 108) * scale.astype(np.float32))


def _q4_k(b: Bytes) -> NDArray[Any]:
    scale, minimum = _six_bit_pairs(b[:, 4:16])
    return _scaled(_nibbles(b[:, 16:], 32), _f16(b, 0) * scale, _f16(b, 2) * minimum)


def _q5_k(b: Bytes) -> NDArray[Any]:
    scale, minimum = _six_bit_pairs(b[:, 4:16])
    q = _nibbles(b[:, 48:], 32) | (_planes(b[:, 16:48], 32, 1) << 4)
    return _scaled(q, _f16(b, 0) * scale, _f16(b, 2) * minimum)


def _q6_k(b: Bytes) -> NDArray[Any]:
    q = (_nibbles(b[:, :128], 64) | (_planes(b[:, 128:192], 32, 2) << 4)).astype(np.int8) - np.int8(32)
    return _scaled(q, _f16(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32))


def _bf16(b: Bytes) -> NDArray[Any]:
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _plain(dtype: str) -> Decoder:
    return lambda b: b.view(dtype).astype(np.dtype(dtype).newbyteorder("="))


DECODERS: dict[str, Decoder] = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "F64": _plain("<f8"),
    "I8": _plain("<i1"),
    "I16": _plain("<i2"),
    "I32": _plain("<i4"),
    "I64": _plain("<i8"),
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
