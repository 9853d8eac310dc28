"""The native CPU kernels as a set of operations: a model is recorded once and then run in one call per forward.

Weights stay in their quantised blocks, re-ordered into tiles (see csrc/packed.h); float weights are kept as they are.
Every row is computed by itself, so results do not depend on what else is in the batch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.kernels.cpu.library import KINDS, SOURCES, BatchStruct, Segment, WeightStruct, library
from paceline.kernels.cpu.recording import Pointers, Recording
from paceline.kernels.ops import Describes, Head, Hidden, Inputs, LayerCache, Packed, Weight
from paceline.kernels.quantise import quantise

_ALIGNED = 64
_SLAB = 8 * 2**20


class NativeWeight:
    """Tiles of one or several matrices with the same columns, and the struct that points at them."""

    def __init__(self, segments: list[tuple[int, np.ndarray[Any, Any], int]], columns: int) -> None:
        self.segments, self.columns = segments, columns
        self.rows = sum(rows for _, _, rows in segments)
        self._array = (Segment * len(segments))(
            *(Segment(kind, 0, data.ctypes.data, rows) for kind, data, rows in segments)
        )
        self.struct = WeightStruct(self._array, len(segments), self.rows, columns)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


def _aligned(size: int) -> np.ndarray[Any, Any]:
    raw = np.empty(size + _ALIGNED, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size]


class Arena:
    """Memory for weights in large pieces, which numpy asks huge pages for: fewer address look-ups while streaming."""

    def __init__(self) -> None:
        self._slab, self._used = _aligned(0), 0

    def take(self, size: int) -> np.ndarray[Any, Any]:
        size = -(-size // _ALIGNED) * _ALIGNED
        if size > _SLAB:
            return _aligned(size)
        if self._used + size > len(self._slab):
            self._slab, self._used = _aligned(_SLAB), 0
        self._used += size
        return self._slab[self._used - size : self._used]


class NativeOps:
    name = "native"

    def __init__(self, quantization: str | None = None) -> None:
        self.quantization = quantization  # the kind of blocks that float matrices are packed into
        found = library()
        if found is None:
            raise OptionError("kernels='native' was asked for, but the native kernels are not built on this machine")
        self.library = found
        self._arena = Arena()
        self._recordings: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self._pointers: Pointers | None = None

    def pack(self, parts: Sequence[Tensor | Packed], dtype: torch.dtype, device: torch.device) -> Weight:
        if device.type != "cpu" or dtype != torch.float32:
            raise OptionError(f"the native kernels compute in float32 on a CPU, not in {dtype} on {device}")
        columns = int(parts[0].shape[1])
        if any(int(part.shape[1]) != columns for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise OptionError(f"matrices of one weight need the same columns, but they are {shapes}")
        packed = NativeWeight([self._segment(part, columns) for part in parts], columns)
        return Weight(packed, (packed.rows, columns))

    def _segment(self, part: Tensor | Packed, columns: int) -> tuple[int, np.ndarray[Any, Any], int]:
        rows = int(part.shape[0])
        if isinstance(part, Tensor) and self.quantization is not None:
            part = quantise(part, self.quantization)
        if not isinstance(part, Tensor) and part.kind in SOURCES:
            source = SOURCES.index(part.kind)
            kind = self.library.paceline_kind(source)
            raw = np.ascontiguousarray(part.raw)
            wanted = self.library.paceline_row_bytes(source, columns)
            if raw.shape != (rows, wanted):
                raise OptionError(
                    f"a {part.kind} matrix of {rows} x {columns} has {raw.shape} bytes, not {rows} x {wanted}"
                )
            tiles = self._tiles(kind, rows, columns)
            self.library.paceline_pack(source, raw.ctypes.data, rows, columns, tiles.ctypes.data)
            return kind, tiles, rows
        dense = part if isinstance(part, Tensor) else part.dequantize()
        kind = KINDS.index("BF16" if dense.dtype == torch.bfloat16 else "F32")
        values = dense.detach().to(torch.float32).contiguous()
        tiles = self._tiles(kind, rows, columns)
        self.library.paceline_pack_dense(kind, values.data_ptr(), rows, columns, tiles.ctypes.data)
        return kind, tiles, rows

    def _tiles(self, kind: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
        return self._arena.take(-(-rows // 16) * int(self.library.paceline_tile_bytes(kind, columns)))

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), weight.shape[1])
        ids = ids.contiguous()
        self.library.paceline_embed(weight.data.struct, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), weight.shape[0])
        address = None if bias is None else bias.data_ptr()
        self.library.paceline_linear(weight.data.struct, x.data_ptr(), len(x), address, out.data_ptr())
        return out

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self.linear(hidden, weight)

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden:
        recording = self._recordings.get(model)
        if recording is None:
            recording = self._recordings[model] = Recording(model)
        layout, lines = inputs.layout, self._lines_of(caches)
        named = (inputs.ids, layout.slots, layout.positions, layout.tree_base, layout.path, layout.first, layout.write)
        held = [None if tensor is None else tensor.contiguous() for tensor in (*named, layout.page_table)]
        hidden = Hidden(torch.empty(len(inputs.ids), recording.width), None)
        batch = BatchStruct(len(inputs.ids), *(None if tensor is None else tensor.data_ptr() for tensor in held))
        batch.path_width = 0 if layout.path is None else layout.path.shape[1]
        batch.table_width, batch.block_size = layout.page_table.shape[1], layout.block_size
        batch.keys, batch.values, batch.head_stride = lines.keys, lines.values, lines.head_stride
        batch.final_buffer, batch.final_out = recording.final, hidden.final.data_ptr()
        if taps:
            held.append(_ask_for_taps(batch, hidden, taps, recording))
        if head is not None:
            held.append(_ask_for_logits(batch, hidden, head))
        self.library.paceline_run(recording.program, batch)  # what it points at is held until here
        return hidden

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        if not caches:
            return
        lines, source, target = self._lines_of(caches), source.contiguous(), target.contiguous()
        shape = len(caches), lines.num_heads, lines.width, lines.head_stride
        self.library.paceline_keep(lines.keys, lines.values, *shape, source.data_ptr(), target.data_ptr(), len(source))

    def _lines_of(self, caches: Sequence[LayerCache]) -> Pointers:
        """Addresses of the cache layers, made again only when they are others."""
        found = self._pointers
        if found is None or found.caches is not caches:
            found = self._pointers = Pointers(caches)
        return found


def _ask_for_taps(batch: BatchStruct, hidden: Hidden, taps: tuple[int, ...], recording: Recording) -> Tensor:
    offsets = list(accumulate((recording.taps[tap] for tap in taps), initial=0))
    wanted = torch.tensor([taps, offsets[:-1]], dtype=torch.int64)
    hidden.tapped = torch.empty(batch.rows, offsets[-1])
    batch.taps, batch.tap_offsets = wanted.data_ptr(), wanted.data_ptr() + 8 * len(taps)
    batch.num_taps, batch.tap_width, batch.tapped_out = len(taps), offsets[-1], hidden.tapped.data_ptr()
    return wanted


def _ask_for_logits(batch: BatchStruct, hidden: Hidden, head: Head) -> Tensor:
    rows = head.rows.contiguous()
    hidden.logits = torch.empty(len(rows), head.weight.shape[0])
    hidden.best = torch.empty(len(rows), dtype=torch.int64)
    batch.head, batch.head_rows, batch.num_head_rows = head.weight.data.address, rows.data_ptr(), len(rows)
    batch.logits_out, batch.best_out = hidden.logits.data_ptr(), hidden.best.data_ptr()
    return rows


__all__ = ["NativeOps", "NativeWeight"]
