"""A model's forward written down once as a flat list of operations over reused buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.cpu.library import Buffer, Op, Program
from paceline.kernels.ops import ACTIVATIONS, FINAL, TOGETHER, Describes, Heads, LayerCache, Weight

# As numbered in program.h.
CODES = (
    "embed",
    "positions",
    "quantise",
    "linear",
    "rms_norm",
    "layer_norm",
    "activation",
    "gated",
    "add",
    "head_norm",
    "rope",
    "store",
    "attention",
    "tap",
)
NOTHING = -1
WINDOW_SHIFT = 16  # attention's n3: layer, and the window above it


class Value:
    """A result by number; its width in floats a row."""

    def __init__(self, number: int, width: int) -> None:
        self.number, self.width = number, width


class Recorder:
    """A `Forward` that writes down instead of computing."""

    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []
        self.widths: list[int] = []
        self.taps: dict[int, int] = {}  # boundary → width
        self.held: list[Any] = []  # tensors and weights the program points at

    def _op(self, code: str, width: int, a: Value | None = None, b: Value | None = None, **values: Any) -> Value:
        result = Value(len(self.widths), width)
        self.widths.append(width)
        numbers = {"a": NOTHING if a is None else a.number, "b": NOTHING if b is None else b.number}
        self.ops.append({"code": CODES.index(code), "out": result.number, **numbers, **values})
        return result

    def _keep(self, tensor: Tensor) -> int:
        own = tensor.detach().to(torch.float32).contiguous()
        self.held.append(own)
        return own.data_ptr()

    def _weight(self, weight: Weight) -> int:
        self.held.append(weight)
        address: int = weight.data.address
        return address

    def embed(self, weight: Weight) -> Value:
        return self._op("embed", weight.shape[1], w0=self._weight(weight))

    def add_positions(self, x: Value, table: Tensor, offset: int) -> Value:
        return self._op("positions", x.width, x, n0=offset, w0=self._keep(table))

    def linear(self, x: Value, weight: Weight, bias: Tensor | None) -> Value:
        extra: dict[str, Any] = {} if bias is None else {"w1": self._keep(bias)}
        self._op("quantise", 0, x, w0=self._weight(weight))
        return self._op("linear", weight.shape[0], x, w0=self._weight(weight), **extra)

    def rms_norm(self, x: Value, weight: Tensor, eps: float) -> Value:
        return self._op("rms_norm", x.width, x, f=eps, w0=self._keep(weight))

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor, eps: float) -> Value:
        return self._op("layer_norm", x.width, x, f=eps, w0=self._keep(weight), w1=self._keep(bias))

    def activation(self, x: Value, kind: str) -> Value:
        return self._op("activation", x.width, x, n0=ACTIVATIONS.index(kind))

    def gated(self, x: Value, kind: str) -> Value:
        return self._op("gated", x.width // 2, x, n0=ACTIVATIONS.index(kind))

    def add(self, x: Value, y: Value) -> Value:
        return self._op("add", x.width, x, y)

    def head_norm(self, qkv: Value, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Value:
        return self._op("head_norm", qkv.width, qkv, f=eps, w0=self._keep(query), w1=self._keep(key), **_shape(heads))

    def rope(self, qkv: Value, heads: Heads, cos: Tensor, sin: Tensor) -> Value:
        return self._op("rope", qkv.width, qkv, w0=self._keep(cos), w1=self._keep(sin), **_shape(heads))

    def attention(self, qkv: Value, heads: Heads, layer: int, window: int | None) -> Value:
        place = {"n3": layer | (window or 0) << WINDOW_SHIFT, **_shape(heads)}
        self._op("store", 0, qkv, **place)
        return self._op("attention", heads.num_heads * heads.head_dim, qkv, **place)

    def tap(self, boundary: int, x: Value) -> None:
        self._op("tap", 0, x, n0=boundary)
        self.taps[boundary] = x.width


def _shape(heads: Heads) -> dict[str, Any]:
    return {"n0": heads.num_heads, "n1": heads.num_kv_heads, "n2": heads.head_dim}


class Recording:
    """The program, its buffers shared by values that never live at the same time."""

    def __init__(self, model: Describes) -> None:
        recorder = Recorder()
        final = model.describe(recorder)
        recorder.tap(FINAL, final)
        self.width, self.taps = final.width, recorder.taps
        self._held = recorder.held
        places, buffers = _assign(recorder, final)
        self.final = places[final.number]
        self._ops = (Op * len(recorder.ops))(*(self._struct(op, places) for op in recorder.ops))
        offsets = [sum(buffers[:i]) for i in range(len(buffers))]
        self._buffers = (Buffer * len(buffers))(*(Buffer(o, w) for o, w in zip(offsets, buffers)))
        self.program = Program(self._ops, len(self._ops), self._buffers, len(buffers), sum(buffers))

    @staticmethod
    def _struct(op: dict[str, Any], places: dict[int, int]) -> Op:
        named = {key: places.get(op[key], NOTHING) for key in ("a", "b", "out")}
        return Op(**{**op, **named})


class Pointers:
    """Where some cache layers lie, as the library wants to be told."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = caches
        shape = caches[0][0].shape
        rows, self.num_heads, self.width = shape
        wanted = (self.width, rows * self.width, 1)  # a head's rows side by side
        for tensor in (tensor for layer in caches for tensor in layer):
            if tensor.dtype != torch.float32 or tensor.shape != shape or tensor.stride() != wanted or rows % TOGETHER:
                raise ValueError("the native kernels need a float32 cache, its rows head by head and sixteen at a time")
        kind = ctypes.c_void_p * len(caches)
        self._arrays = [kind(*(layer[part].data_ptr() for layer in caches)) for part in (0, 1)]
        self.keys, self.values = (ctypes.addressof(array) for array in self._arrays)
        self.head_stride = rows * self.width


def _assign(recorder: Recorder, final: Value) -> tuple[dict[int, int], list[int]]:
    """Buffers for values: one is free again after its value's last use and goes to the next of the same width."""
    last = {final.number: len(recorder.ops)}
    for index, op in enumerate(recorder.ops):
        for value in (op["a"], op["b"]):
            if value != NOTHING:
                last[value] = max(last.get(value, 0), index)
    places: dict[int, int] = {}
    buffers: list[int] = []
    free: list[int] = []
    for index, op in enumerate(recorder.ops):
        width = recorder.widths[op["out"]]
        if width:
            found = next((place for place in free if buffers[place] == width), None)
            if found is None:
                found = len(buffers)
                buffers.append(width)
            else:
                free.remove(found)
            places[op["out"]] = found
        for value in {op["a"], op["b"]} - {NOTHING}:
            if last[value] == index:
                free.append(places[value])
    return places, buffers
