"""Packed weights in a file: written once, then mapped by every process that wants the same ones.

    magic, length and checksum of the header | header (JSON) | zeros up to a page | tiles, each at a multiple of 64

A file is used only if it was written by this very library, from the same files, in the same way; else it is written
anew. Nothing here is needed to compute: whatever fails, weights are packed in memory as if there were no file.
This module knows bytes and weights. It must not know models or where the files lie.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.kernels.cpu import library
from paceline.kernels.cpu.native import NativeWeight
from paceline.kernels.ops import Weight

MAGIC = b"PACETILE"
FORMAT = 2
PAGE, ALIGNED = 4096, 64
AT_ONCE = 16 * 2**20  # bytes written in one call: what is written in large pieces can be mapped in large pages
_START = struct.Struct("<8sQI")

Bytes = np.ndarray[Any, Any]
Segment = tuple[int, Bytes, int]  # kind, tiles, rows


class Tiles:
    """The weights of one model, by name: those that `path` holds, or those that `save` will write there.

    identity: what the weights follow from (files, how they are packed), as JSON has it.
    """

    def __init__(self, path: Path, identity: Any) -> None:
        self.path = path
        self._identity = [FORMAT, _library_digest(), identity]
        self._used: dict[str, NativeWeight] = {}  # what the model is made of
        self.num_packed = 0  # bytes of it that no file had
        self._kept = self._read()

    def find(self, name: str, shape: tuple[int, int]) -> Weight | None:
        """The weight as it was kept, if it was."""
        if name not in self._kept:
            return None
        columns, segments = self._kept[name]
        if (sum(rows for _, _, rows in segments), columns) != shape:
            return None
        self._used[name] = NativeWeight(segments, columns)
        return Weight(self._used[name], shape)

    def add(self, name: str, weight: Weight) -> None:
        """One that had to be packed."""
        self._used[name] = weight.data
        self.num_packed += sum(len(data) for _, data, _ in weight.data.segments)

    def save(self) -> bool:
        """Write all that the model is made of; whether that could be done."""
        with contextlib.suppress(OSError):
            with _whole_file(self.path) as file:
                self._write(file)
            self._remember()
            return True
        return False

    def _write(self, file: BinaryIO) -> None:
        weights, sums, at = {}, [], 0
        for name, weight in self._used.items():
            listed = []
            for kind, data, rows in weight.segments:
                listed.append([kind, rows, at, len(data)])
                sums.append(zlib.crc32(data.data))
                at += -(-len(data) // ALIGNED) * ALIGNED
            weights[name] = [weight.columns, listed]
        header = json.dumps({"of": self._identity, "weights": weights, "sums": sums, "size": at}).encode()
        file.write(_START.pack(MAGIC, len(header), zlib.crc32(header)) + header)
        file.write(b"\0" * (-file.tell() % PAGE))
        for weight in self._used.values():
            for _, data, _ in weight.segments:
                file.write(data.data)
                file.write(b"\0" * (-len(data) % ALIGNED))

    def _read(self) -> dict[str, tuple[int, list[Segment]]]:
        """What a sound file of the same identity holds; nothing where there is none."""
        try:
            with self.path.open("rb") as file:
                magic, length, checksum = _START.unpack(file.read(_START.size))
                if magic != MAGIC or length > os.fstat(file.fileno()).st_size:
                    return {}
                header = file.read(length)
                if zlib.crc32(header) != checksum:
                    return {}
                said = json.loads(header)
                start = -(-file.tell() // PAGE) * PAGE
                if said["of"] != self._identity or os.fstat(file.fileno()).st_size != start + said["size"]:
                    return {}
                data = _map(file, start, said["size"])
            kept: dict[str, tuple[int, list[Segment]]] = {}
            for name, (columns, listed) in said["weights"].items():
                kept[name] = columns, [(kind, data[at : at + size], rows) for kind, rows, at, size in listed]
            if not all(map(_is_whole, kept.values())):
                return {}
            if not self._is_known() and not self._is_sound(kept, said["sums"]):
                return {}
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return {}
        with contextlib.suppress(OSError):  # the one that was used last is the last to be dropped
            os.utime(self.path, ns=(time.time_ns(), self.path.stat().st_mtime_ns))
        return kept

    def _is_known(self) -> bool:
        """Whether every byte was looked at since the file was last written to."""
        try:
            return self._note.read_text() == _state(self.path)
        except OSError:
            return False

    def _is_sound(self, kept: dict[str, tuple[int, list[Segment]]], sums: list[int]) -> bool:
        if [zlib.crc32(tiles.data) for _, segments in kept.values() for _, tiles, _ in segments] != sums:
            return False
        self._remember()
        return True

    def _remember(self) -> None:
        with contextlib.suppress(OSError):
            self._note.write_text(_state(self.path))

    @property
    def _note(self) -> Path:
        """What is known of the file, beside it."""
        return self.path.with_name(f"{self.path.name}.checked")


def _is_whole(kept: tuple[int, list[Segment]]) -> bool:
    """Whether the kernels would find all the bytes that they will look for."""
    loaded, (columns, segments) = library.library(), kept
    return loaded is not None and all(
        len(data) >= loaded.paceline_weight_bytes(kind, rows, columns) for kind, data, rows in segments
    )


def _map(file: BinaryIO, start: int, size: int) -> Bytes:
    mapped = mmap.mmap(file.fileno(), start + size, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer address look-ups while streaming, as in the arena
    return np.frombuffer(mapped, np.uint8, size, start)


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"


@functools.cache
def _library_digest() -> str:
    """Another build of the library may pack otherwise."""
    return hashlib.sha256(Path(library.__file__).with_name(library.NAME).read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when it is whole; whoever writes at the same time does the same."""
    part = path.with_name(f".{secrets.token_hex(8)}{path.suffix}.part")
    try:
        with part.open("xb", buffering=AT_ONCE) as file:
            yield file
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
