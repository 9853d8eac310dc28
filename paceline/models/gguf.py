"""GGUF files: the container (versions 2 and 3, little endian) and the arithmetic of its block formats.

Knows the byte layout of the header and of each packed block, and hands out memory-mapped tensors and plain metadata.
Must not know what a tensor is for: architectures, tensor naming and tokenizers belong to the modules that read this.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import CheckpointError

Bytes = NDArray[np.uint8]
Decoder = Callable[[Bytes], NDArray[Any]]

# Type id -> (name, elements per block, bytes per block), for every type the format has numbered so far.
# fmt: off
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}
# fmt: on
BLOCKS: dict[str, tuple[int, int]] = {name: (elements, size) for name, elements, size in _TYPES.values()}

# Metadata value types 0..12; 8 is a string and 9 an array.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS, _MAX_NESTING = 4, 8
_CHUNK_ELEMENTS = 1 << 22  # decoded at a time, so that unpacking scratch stays small beside the result


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


_DECODERS: dict[str, Decoder] = {
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


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One tensor, still packed: `raw` is (rows, bytes per row), where every leading dimension counts as rows."""

    name: str
    kind: str
    shape: tuple[int, ...]
    raw: Bytes = field(repr=False)
    source: str = field(default="the GGUF file", repr=False)  # named in errors

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, computed in float32 (plain kinds: as stored) and cast to `dtype`, in memory of their own."""
        decode = _DECODERS.get(self.kind)
        if decode is None:
            readable = ", ".join(_DECODERS)
            raise CheckpointError(f"{self.source}: tensor {self.name!r} is stored as {self.kind}; can read {readable}")
        elements, size = BLOCKS[self.kind]
        blocks = self.raw.reshape(-1, size)
        out = torch.empty(len(blocks) * elements, dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // elements)
        with np.errstate(all="ignore"):  # a damaged scale may be infinite; that is the file's value, not a fault here
            for start in range(0, len(blocks), step):
                values = decode(np.ascontiguousarray(blocks[start : start + step])).reshape(-1)
                begin = start * elements
                out[begin : begin + values.size] = torch.from_numpy(values)
        return out.reshape(self.shape)

    def rows(self, index: Sequence[int] | NDArray[Any] | torch.Tensor) -> GGUFTensor:
        """The chosen entries along the first dimension, gathered without unpacking a block."""
        if not self.shape or (len(self.shape) == 1 and BLOCKS[self.kind][0] > 1):
            raise CheckpointError(f"{self.source}: tensor {self.name!r} has no rows to choose from")
        chosen = np.asarray(index, dtype=np.int64)
        first = self.raw.reshape(self.shape[0], -1)[chosen]
        shape = (len(chosen), *self.shape[1:])
        raw = first.reshape(1 if len(shape) == 1 else math.prod(shape[:-1]), -1)
        return replace(self, shape=shape, raw=raw)


class _Cursor:
    """Reads forward through the header, checking every length against what is left of the file."""

    def __init__(self, data: Bytes, source: str) -> None:
        self.data, self.source = data.data, source
        self.at, self.end = 0, len(data)

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: {reason}")

    def need(self, count: int, what: str) -> int:
        start = self.at
        if count > self.end - start:
            self.fail(f"the file ends inside {what} (needs {count} bytes at {start}, has {self.end - start})")
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int.from_bytes(self.data[self.need(4, what) : self.at], "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.data[self.need(8, what) : self.at], "little")

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.need(length, what)
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def strings(self, count: int, what: str) -> list[str]:
        """`string`, `count` times, without a call per entry: vocabularies have hundreds of thousands."""
        if count > (self.end - self.at) // 8:
            self.fail(f"the file ends inside {what} ({count} strings cannot fit)")
        data, end, at, found = self.data, self.end, self.at, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end or (stop := at + 8 + length_at(data, at)[0]) > end:
                self.fail(f"the file ends inside {what}")
            try:
                found.append(str(data[at + 8 : stop], "utf-8"))
            except UnicodeDecodeError:
                self.fail(f"{what} holds a string that is not valid UTF-8")
            at = stop
        self.at = at
        return found

    def numbers(self, kind: int, count: int, what: str) -> NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        start = self.need(count * dtype.itemsize, what)
        if kind == 7:  # any nonzero byte is true, whatever numpy makes of it
            dtype = np.dtype(np.uint8)
        found: NDArray[Any] = np.frombuffer(self.data, dtype, count, start)
        return found.astype(bool if kind == 7 else dtype.newbyteorder("="))

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.numbers(kind, 1, what)[0].item()
        if kind != _ARRAY or depth > _MAX_NESTING:
            self.fail(f"{what} has value type {kind}" if kind != _ARRAY else f"{what} nests too deep")
        item, count = self.u32(what), self.u64(what)
        if item == _STRING:
            return self.strings(count, what)
        if item in _SCALARS:
            return self.numbers(item, count, what)
        if count > (self.end - self.at) // 12:
            self.fail(f"the file ends inside {what} ({count} arrays cannot fit)")
        return [self.value(item, what, depth + 1) for _ in range(count)]


class GGUFFile:
    """A GGUF file opened for reading: `metadata` as Python values (arrays of numbers as numpy), `tensors` by name."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = fspath(path)
        try:
            # np.asarray drops the memmap subclass, whose slicing is slow; the mapping stays alive through the views.
            mapped = np.memmap(self.path, np.uint8, mode="r")
            data = np.asarray(mapped)
        except ValueError:
            raise CheckpointError(f"{self.path}: the file is empty") from None
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened ({error.strerror or error})") from None
        self._mapping: Any = getattr(mapped, "_mmap", None)
        cursor = _Cursor(data, self.path)
        tensor_count, entry_count = _read_preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                cursor.fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(cursor.u32(f"metadata {key!r}"), f"metadata {key!r}")
        self.tensors: dict[str, GGUFTensor] = _read_tensors(cursor, data, tensor_count, self.metadata)

    def forget(self, beginning: str) -> None:
        """Drop metadata that nobody will ask for again: a vocabulary takes megabytes."""
        for key in [key for key in self.metadata if key.startswith(beginning)]:
            del self.metadata[key]

    def release(self) -> None:
        """Give back the memory that holds what was read so far; what is read again comes from the file again."""
        if hasattr(self._mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    if bytes(cursor.data[:4]) != b"GGUF":
        cursor.fail("not a GGUF file (it does not begin with the letters GGUF)")
    cursor.at = 4
    version = cursor.u32("the header")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        cursor.fail(
            "big-endian GGUF is not supported" if swapped in (2, 3) else f"GGUF version {version}; can read 2, 3"
        )
    return cursor.u64("the header"), cursor.u64("the header")


def _read_tensors(cursor: _Cursor, data: Bytes, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
        cursor.fail(f"general.alignment is {alignment!r}, not a positive number")
    listed: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.string("a tensor name")
        what = f"tensor {name!r}"
        if name in listed:
            cursor.fail(f"{what} appears twice")
        dims = cursor.u32(what)
        if dims > _MAX_DIMS:
            cursor.fail(f"{what} has {dims} dimensions; at most {_MAX_DIMS} are allowed")
        shape = tuple(cursor.u64(what) for _ in range(dims))[::-1]
        type_id = cursor.u32(what)
        if type_id not in _TYPES:
            cursor.fail(f"{what} has unknown type id {type_id}")
        listed[name] = (_TYPES[type_id][0], shape, cursor.u64(what))
    base = -(-cursor.at // alignment) * alignment
    return {
        name: GGUFTensor(name, kind, shape, _locate(cursor, data, name, kind, shape, base + offset), cursor.source)
        for name, (kind, shape, offset) in listed.items()
    }


def _locate(cursor: _Cursor, data: Bytes, name: str, kind: str, shape: tuple[int, ...], start: int) -> Bytes:
    """The packed bytes of one tensor as (rows, bytes per row), once its size and place are known to be sound."""
    elements, size = BLOCKS[kind]
    columns = shape[-1] if shape else 1
    if 0 in shape or columns % elements:
        cursor.fail(f"tensor {name!r} of type {kind} cannot have shape {shape}")
    per_row = columns // elements * size
    rows = math.prod(shape[:-1])
    if start + rows * per_row > len(data):
        cursor.fail(f"tensor {name!r} lies outside of the file (ends at {start + rows * per_row} of {len(data)} bytes)")
    return data[start : start + rows * per_row].reshape(rows, per_row)
