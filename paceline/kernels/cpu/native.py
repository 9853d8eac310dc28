"""The native CPU kernels as a set of operations: a model is recorded once and then run in one call per forward.

Weights stay in their quantised blocks or their 16 or 32 bits, re-ordered into tiles (see csrc/packed.h). Arithmetic is
in float32. Every row is computed by itself, so results do not depend on what else is in the batch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.kernels.chain import Branches, Chain, Drafts, Growing, Sprout
from paceline.kernels.cpu import chain as chains
from paceline.kernels.cpu.library import (
    KINDS,
    SOURCES,
    BatchStruct,
    Layer,
    Segment,
    WeightStruct,
    library,
    missing,
)
from paceline.kernels.cpu.recording import Recording, Shapes
from paceline.kernels.ops import TOGETHER, Describes, Head, Hidden, Inputs, LayerCache, Packed, Weight
from paceline.kernels.quantise import quantise
from paceline.kernels.rounds import Rounds

_CPU = torch.device("cpu")
_NARROW = {torch.bfloat16: "BF16", torch.float16: "F16"}  # others are kept as F32
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


class Layers:
    """Where some cache layers lie, as the library wants to be told; each has its own heads and width."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = caches
        self.fits: set[Recording] = set()  # the descriptions they were compared with
        for layer in caches:
            if not _fits(layer):
                raise ValueError(
                    "the native kernels need layers of keys and values of as many heads, or of one row for all heads: "
                    f"a float32 cache, its rows head by head and {TOGETHER} at a time"
                )
        self.array = (Layer * len(caches))(*(_layer(*layer) for layer in caches))
        self.address = ctypes.addressof(self.array)

    def check(self, recording: Recording) -> None:
        """The layers a description looks at are there, in the shapes it says."""
        for number, shapes in recording.looks.items():
            if not 0 <= number < len(self.caches):
                raise ValueError(f"the description looks at cache layer {number}; given: {len(self.caches)} layers")
            found = tuple((part.shape[1], part.shape[2]) for part in self.caches[number])
            if found != shapes:
                raise ValueError(
                    f"cache layer {number} holds {_told(found)}, but the description looks at {_told(shapes)}"
                )
        self.fits.add(recording)


def _fits(layer: LayerCache) -> bool:
    """A head's rows lie side by side; of one part there is one head."""
    rows, heads = layer[0].shape[:2]
    return (
        rows % TOGETHER == 0
        and (len(layer) == 2 or (len(layer) == 1 and heads == 1))
        and all(part.dtype == torch.float32 and part.shape[:2] == (rows, heads) for part in layer)
        and all(part.stride() == (part.shape[2], rows * part.shape[2], 1) for part in layer)
    )


def _layer(keys: Tensor, values: Tensor | None = None) -> Layer:
    if values is None:
        return Layer(keys.data_ptr(), None, *keys.shape, 0)
    return Layer(keys.data_ptr(), values.data_ptr(), *keys.shape, values.shape[2])


def _told(shapes: Shapes) -> str:
    return " and ".join(dict.fromkeys(f"{heads} heads of {width} values" for heads, width in shapes))


class NativeOps:
    name, chains, trees, captures = "native", True, False, False
    rounds: Rounds | None = None

    def __init__(self, quantization: str | None = None, stored: torch.dtype = torch.float32) -> None:
        self.quantization = quantization  # the kind of blocks that float matrices are packed into
        self.stored = stored  # what the others are kept in; float32: each in its own 16 or 32 bits, nothing is rounded
        found = library()
        if found is None:
            raise OptionError(f"kernels='native' and quantization need the native kernels, which {missing()}")
        self.library = found
        self._arena = Arena()
        self._recordings: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self._layers: Layers | None = None
        self._linked: chains.Linked | None = None

    def prepare(self, rounds: Iterable[Callable[[], object]]) -> None:
        """They were compiled long ago."""

    def pack(
        self,
        parts: Sequence[Tensor | Packed],
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        picked: bool = False,
    ) -> Weight:
        if device.type != "cpu" or dtype != torch.float32:
            raise OptionError(f"the native kernels compute in float32 on a CPU, not in {dtype} on {device}")
        columns = int(parts[0].shape[1])
        if any(int(part.shape[1]) != columns for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise OptionError(f"matrices of one weight need the same columns, but they are {shapes}")
        packed = NativeWeight([self._segment(part, columns, exact) for part in parts], columns)
        return Weight(packed, (packed.rows, columns))

    def _segment(self, part: Tensor | Packed, columns: int, exact: bool) -> tuple[int, np.ndarray[Any, Any], int]:
        rows = int(part.shape[0])
        if not isinstance(part, Tensor) and part.kind not in SOURCES:
            part = part.dequantize()
        if isinstance(part, Tensor) and self.quantization is not None and not exact:
            part = quantise(part, self.quantization)
        if not isinstance(part, Tensor):
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
        dense = part.detach() if exact else self._rounded(part.detach())
        kind = KINDS.index(_NARROW.get(dense.dtype, "F32"))
        values = (dense if dense.dtype in _NARROW else dense.float()).cpu().contiguous()
        tiles = self._tiles(kind, rows, columns)
        self.library.paceline_pack_dense(kind, values.data_ptr(), rows, columns, tiles.ctypes.data)
        return kind, tiles, rows

    def _rounded(self, dense: Tensor) -> Tensor:
        if self.stored not in _NARROW or dense.dtype == self.stored:
            return dense
        rounded = dense.to(self.stored)
        if rounded.isinf().any() and not dense.isinf().any():
            most, allowed = float(dense.abs().max()), torch.finfo(self.stored).max
            name = str(self.stored).removeprefix("torch.")
            raise OptionError(f"dtype={name} cannot hold a weight of {most:.6g}; allowed: up to {allowed:.6g}")
        return rounded

    def _tiles(self, kind: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
        return self._arena.take(int(self.library.paceline_weight_bytes(kind, rows, columns)))

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        out = floats(len(ids), weight.shape[1])
        ids = ids.contiguous()
        self.library.paceline_embed(weight.data.struct, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = x.to(torch.float32).contiguous()
        out = floats(len(x), weight.shape[0])
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        address = None if bias is None else bias.data_ptr()
        self.library.paceline_linear(weight.data.struct, x.data_ptr(), len(x), address, out.data_ptr())
        return out

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self.linear(hidden, weight)

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden:
        recording = self._recordings.get(model) or self._record(model)
        recording.check(inputs)
        layers = self._layers_of(caches)
        if recording not in layers.fits:
            layers.check(recording)
        batch, held = _batch_of(inputs)
        if recording.asks:
            held.append(recording.hand_over(batch, inputs))
        hidden = Hidden(floats(batch.rows, recording.width), None)
        batch.layers = layers.address
        batch.final_buffer, batch.final_out = recording.final, hidden.final.data_ptr()
        if taps:
            held.append(_ask_for_taps(batch, hidden, taps, recording))
        if head is not None:
            held.append(_ask_for_logits(batch, hidden, head))
        self.library.paceline_run(recording.program, batch)  # what it points at is held until here
        return hidden

    def tree(self, sprout: Sprout, form: Branches | Growing, caches: Sequence[LayerCache]) -> Drafts:
        raise NotImplementedError("the native kernels draw no trees in one go")

    def chain(self, chain: Chain, caches: Sequence[LayerCache]) -> Drafts:
        layers, linked = self._layers_of(caches), self._linked
        if linked is None or not linked.fits(chain):
            networks = [network for network, *_ in chain.links]
            found = [None if one is None else self._recordings.get(one) or self._record(one) for one in networks]
            linked = self._linked = chains.Linked(chain, found)
        for recording in linked.runs:
            if recording not in layers.fits:
                layers.check(recording)
        return chains.draw(linked, chain, layers)

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        source, target = source.contiguous(), target.contiguous()
        rows = source.data_ptr(), target.data_ptr(), source.numel()
        self.library.paceline_keep(self._layers_of(caches).array, len(caches), *rows)

    def _record(self, model: Describes) -> Recording:
        recording = self._recordings[model] = Recording(model)
        return recording

    def _layers_of(self, caches: Sequence[LayerCache]) -> Layers:
        """Addresses of the cache layers, made again only when they are others."""
        found = self._layers
        if found is None or found.caches is not caches:
            found = self._layers = Layers(caches)
        return found


def floats(*shape: int) -> Tensor:
    """Memory for the library to write to: float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device=_CPU)


def _batch_of(inputs: Inputs) -> tuple[BatchStruct, list[Any]]:
    """Ids and layout as the library reads them, and what must be held meanwhile."""
    layout, tensors = inputs.layout, [inputs.ids]
    if layout is not None:
        tensors += [layout.slots, layout.positions, layout.tree_base, layout.path, layout.first, layout.write]
        tensors += [layout.page_table, layout.until]
        if (windowed := layout.windowed) is not None:
            tensors += [windowed.write, windowed.page_table]
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    batch = BatchStruct(inputs.num_rows, *[None if tensor is None else tensor.data_ptr() for tensor in held])
    if layout is not None:
        batch.path_width = 0 if layout.path is None else layout.path.shape[1]
        batch.table_width, batch.block_size = layout.page_table.shape[1], layout.block_size
    return batch, held


def _ask_for_taps(batch: BatchStruct, hidden: Hidden, taps: tuple[int, ...], recording: Recording) -> Tensor:
    wanted, width = chains.tap_places(taps, tuple([recording.taps[tap] for tap in taps]))
    hidden.tapped = floats(batch.rows, width)
    batch.taps, batch.tap_offsets = wanted.data_ptr(), wanted.data_ptr() + 8 * len(taps)
    batch.num_taps, batch.tap_width, batch.tapped_out = len(taps), width, hidden.tapped.data_ptr()
    return wanted


def _ask_for_logits(batch: BatchStruct, hidden: Hidden, head: Head) -> Tensor:
    rows = torch.arange(batch.rows) if head.rows is None else head.rows.contiguous()
    count = rows.shape[0]
    hidden.logits = floats(count, head.weight.shape[0])
    hidden.best = torch.empty(count, dtype=torch.int64, device=_CPU)
    batch.head, batch.head_rows, batch.num_head_rows = head.weight.data.address, rows.data_ptr(), count
    batch.logits_out, batch.best_out = hidden.logits.data_ptr(), hidden.best.data_ptr()
    return rows


__all__ = ["NativeOps", "NativeWeight"]
