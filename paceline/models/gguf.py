"""GGUF files: the container, versions 2 and 3, little endian.

Knows the byte layout of the header, and hands out memory-mapped tensors and plain metadata. Must not know what is in a
block (that is `kernels.blocks`) or what a tensor is for: architectures, names and tokenizers belong to its readers.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.kernels.blocks import BLOCKS, DECODERS, Blocks, Bytes

# What a tensor's type id stands for: every kind the format has numbered so far.
# fmt: off
_KINDS: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
# fmt: on

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


@dataclass(frozen=True, eq=False)
class GGUFTensor(Blocks):
    """One tensor, still packed; every leading dimension counts as rows."""

    name: str = ""
    source: str = field(default="the GGUF file", repr=False)  # named in errors

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self.kind not in DECODERS:
            readable = ", ".join(DECODERS)
            raise CheckpointError(f"{self.source}: tensor {self.name!r} is stored as {self.kind}; can read {readable}")
        return super().dequantize(dtype)

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
        if type_id not in _KINDS:
            cursor.fail(f"{what} has unknown type id {type_id}")
        listed[name] = (_KINDS[type_id], shape, cursor.u64(what))
    base = -(-cursor.at // alignment) * alignment
    return {
        name: GGUFTensor(kind, shape, _locate(cursor, data, name, kind, shape, base + offset), name, cursor.source)
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
