"""A model's forward written down once as a flat list of operations over reused buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.cpu.library import OPERATIONS, BatchStruct, Buffer, Op, Program
from paceline.kernels.ops import ACTIVATIONS, FINAL, SCORINGS, TOGETHER, Describes, Experts, Heads, Inputs, Weight

NOTHING = -1
Shapes = tuple[tuple[int, int], ...]


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
        self.named: dict[str, int] = {}  # inputs by name → width, in the order they are handed over
        self.bounds: list[str] = []  # the same of those that say how far a row sees
        self.looks: dict[int, Shapes] = {}  # cache layer → heads and their width in each part

    def _op(self, code: str, width: int, a: Value | None = None, b: Value | None = None, **values: Any) -> Value:
        result = Value(len(self.widths), width)
        self.widths.append(width)
        numbers = {"a": NOTHING if a is None else a.number, "b": NOTHING if b is None else b.number}
        self.ops.append({"code": OPERATIONS.index(code), "out": result.number, **numbers, **values})
        return result

    def _address(self, tensor: Tensor) -> int:
        own = tensor.detach().to(torch.float32).contiguous()
        self.held.append(own)
        return own.data_ptr()

    def _weight(self, weight: Weight) -> int:
        self.held.append(weight)
        address: int = weight.data.address
        return address

    def embed(self, weight: Weight) -> Value:
        return self._op("embed", weight.shape[1], w0=self._weight(weight))

    def input(self, name: str, width: int) -> Value:
        if self.named.setdefault(name, width) != width:
            raise ValueError(f"input {name!r} is asked for with {self.named[name]} and with {width} values a row")
        return self._op("input", width, n0=list(self.named).index(name))

    def add_positions(self, x: Value, table: Tensor, offset: int) -> Value:
        _check_width("add_positions", x, table.shape[1])
        return self._op("positions", x.width, x, n0=offset, w0=self._address(table))

    def linear(self, x: Value, weight: Weight, bias: Tensor | None) -> Value:
        extra: dict[str, Any] = {} if bias is None else {"w1": self._address(bias)}
        _check_width("linear", x, weight.shape[1])
        self._op("quantise", 0, x, w0=self._weight(weight))
        return self._op("linear", weight.shape[0], x, w0=self._weight(weight), **extra)

    def rms_norm(self, x: Value, weight: Tensor, eps: float, bias: Tensor | None = None) -> Value:
        _check_width("rms_norm", x, len(weight))
        extra: dict[str, Any] = {} if bias is None else {"w1": self._address(bias)}
        return self._op("rms_norm", x.width, x, f=eps, w0=self._address(weight), **extra)

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor, eps: float) -> Value:
        _check_width("layer_norm", x, len(weight))
        return self._op("layer_norm", x.width, x, f=eps, w0=self._address(weight), w1=self._address(bias))

    def activation(self, x: Value, kind: str) -> Value:
        return self._op("activation", x.width, x, n0=ACTIVATIONS.index(kind))

    def gated(self, x: Value, kind: str) -> Value:
        return self._op("gated", x.width // 2, x, n0=ACTIVATIONS.index(kind))

    def experts(self, x: Value, scores: Value, experts: Experts) -> Value:
        _check_experts(x, scores, experts)
        how = experts.routing
        rule: dict[str, Any] = {"n0": how.num_chosen, "n1": SCORINGS.index(how.scoring), "n2": how.normalised}
        rule |= {"n3": how.num_groups, "n4": how.kept_groups, "f": how.factor}
        if experts.bias is not None:
            rule["w0"] = self._address(experts.bias)
        gate_up, down = (
            {"n0": how.num_chosen, "n1": scores.width, "w0": self._weight(stack)}
            for stack in (experts.gate_up, experts.down)
        )
        routed = self._op("route", 2 * how.num_chosen + 3 * scores.width, scores, None, **rule)
        self._op("sort", 0, routed, None, w1=down["w0"], **gate_up)
        self._op("spread", 0, x, None, **gate_up)
        self._op("experts", 0, x, None, **gate_up)  # x: floats are read where they are
        self._op("expert_gated", 0, None, None, n2=ACTIVATIONS.index(experts.activation), **down)
        self._op("experts", 0, None, None, **down)
        return self._op("combine", x.width, routed, n0=how.num_chosen)

    def add(self, x: Value, y: Value) -> Value:
        _check_width("add", y, x.width)
        return self._op("add", x.width, x, y)

    def head_norm(self, qkv: Value, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Value:
        _check_heads("head_norm", qkv, heads)
        return self._op(
            "head_norm", qkv.width, qkv, f=eps, w0=self._address(query), w1=self._address(key), **_shape(heads)
        )

    def multiply(self, x: Value, y: Value) -> Value:
        _check_width("multiply", y, x.width)
        return self._op("multiply", x.width, x, y)

    def scale(self, x: Value, factor: float) -> Value:
        return self._op("scale", x.width, x, f=factor)

    def concat(self, x: Value, y: Value) -> Value:
        return self._op("concat", x.width + y.width, x, y)

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        if sum(sizes) != x.width:
            raise ValueError(f"a row of {x.width} values cannot be cut into {list(sizes)}")
        starts = accumulate(sizes, initial=0)
        return [self._op("columns", size, x, n0=start) for size, start in zip(sizes, starts)]

    def rope(self, qkv: Value, heads: Heads, cos: Tensor, sin: Tensor) -> Value:
        _check_heads("rope", qkv, heads)
        if 2 * cos.shape[1] > heads.head_dim:
            raise ValueError(f"tables of {cos.shape[1]} columns cannot turn heads of {heads.head_dim} values")
        tables = {"w0": self._address(cos), "w1": self._address(sin)}
        return self._op("rope", qkv.width, qkv, None, n3=cos.shape[1], **tables, **_shape(heads))

    def attention(
        self,
        qkv: Value,
        heads: Heads,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:
        keys = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        _check_width("attention", qkv, keys + heads.num_kv_heads * heads.value_width)
        self._op("store", 0, qkv, n3=layer, n4=window or 0, **_shape(heads))
        return self._look(qkv, heads, scale, softcap, n3=layer, n4=window or 0)

    def cross_attention(
        self, q: Value, heads: Heads, layer: int, below: str, scale: float | None = None, softcap: float | None = None
    ) -> Value:
        _check_width("cross_attention", q, heads.num_heads * heads.head_dim)
        if below not in self.bounds:
            self.bounds.append(below)
        return self._look(q, heads, scale, softcap, n3=layer, n5=1 + self.bounds.index(below))

    def _look(self, q: Value, heads: Heads, scale: float | None, softcap: float | None, **places: int) -> Value:
        self.looks[places["n3"]] = tuple((heads.num_kv_heads, d) for d in (heads.head_dim, heads.value_width))
        numbers = {"f": scale or 0.0, "g": softcap or 0.0}  # 0: the usual scale, no cap
        return self._op("attention", heads.num_heads * heads.value_width, q, None, **numbers, **places, **_shape(heads))

    def latent_attention(self, q: Value, latent: Value, num_heads: int, rank: int, layer: int, scale: float) -> Value:
        _check_width("latent_attention", q, num_heads * latent.width)
        if not 0 < rank <= latent.width:
            raise ValueError(f"a row of {latent.width} values has no {rank} of them to be looked at")
        self.looks[layer] = ((1, latent.width),)
        self._op("store", 0, latent, n3=layer, **_shape(Heads(0, 1, latent.width)))
        together = max(count for count in range(1, TOGETHER + 1) if num_heads % count == 0)
        shape = _shape(Heads(num_heads, num_heads // together, latent.width))
        return self._op("attention", num_heads * rank, q, latent, f=scale, n3=layer, **shape)

    def per_head(self, x: Value, weight: Weight, num_heads: int) -> Value:
        segments = weight.data.segments
        if len(segments) != num_heads or len({rows for _, _, rows in segments}) > 1:
            raise ValueError(f"a weight for {num_heads} heads is packed from as many matrices of one shape")
        kept = x.width // num_heads - weight.shape[1]
        _check_width("per_head", x, num_heads * (max(0, kept) + weight.shape[1]))
        numbers = {"n0": num_heads, "n1": kept, "w0": self._weight(weight)}
        self._op("quantise", 0, x, None, **numbers)
        return self._op("per_head", num_heads * kept + weight.shape[0], x, None, **numbers)

    def tap(self, boundary: int, x: Value) -> None:
        self._op("tap", 0, x, n0=boundary)
        self.taps[boundary] = x.width


def _check_width(word: str, x: Value, width: int) -> None:
    """The library trusts widths: a row that is too narrow would be read beyond its end."""
    if x.width != width:
        raise ValueError(f"{word} was given a row of {x.width} values where {width} are needed")


def _check_experts(x: Value, scores: Value, experts: Experts) -> None:
    """Each stack holds as many alike parts as there are scores, and of the shapes that fit the rows."""
    count, how = scores.width, experts.routing
    narrow = experts.down.shape[1]
    for name, weight, shape in (
        ("gate_up", experts.gate_up, (2 * narrow, x.width)),
        ("down", experts.down, (x.width, narrow)),
    ):
        segments = weight.data.segments
        each = len(segments) // count
        sizes = [sum(rows for _, _, rows in segments[e * each : (e + 1) * each]) for e in range(count)]
        if weight.shape != (count * shape[0], shape[1]) or len(segments) % count or set(sizes) != {shape[0]}:
            raise ValueError(f"experts was given {name} of {weight.shape} where {count} times {shape} are needed")
    if not 1 <= how.num_chosen <= count // how.num_groups * how.kept_groups or count % how.num_groups:
        raise ValueError(f"experts cannot be chosen by {how} from {count} scores")
    if experts.bias is not None and experts.bias.shape != (count,):
        raise ValueError(f"experts was given a bias of {tuple(experts.bias.shape)} where ({count},) are needed")


def _check_heads(word: str, qkv: Value, heads: Heads) -> None:
    """Queries and keys at least: they are what is turned and normed."""
    needed = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    if qkv.width < needed:
        raise ValueError(f"{word} was given a row of {qkv.width} values where {needed} are needed")


def _shape(heads: Heads) -> dict[str, Any]:
    return {"n0": heads.num_heads, "n1": heads.num_kv_heads, "n2": heads.head_dim}


class Recording:
    """The program, its buffers shared by values that never live at the same time."""

    def __init__(self, model: Describes) -> None:
        recorder = Recorder()
        final = model.describe(recorder)
        recorder.tap(FINAL, final)
        self.width, self.taps = final.width, recorder.taps
        self._held, self.named, self.bounds = recorder.held, recorder.named, recorder.bounds
        self.asks = bool(self.named or self.bounds)  # whether it has inputs by name
        self._addresses = [ctypes.c_void_p * len(names) for names in (self.named, self.bounds)]
        self.looks = recorder.looks
        codes = {OPERATIONS[op["code"]] for op in recorder.ops}
        self._embeds, self._places = "embed" in codes, bool(codes & {"positions", "rope", "attention"})
        places, buffers = _assign(recorder, final)
        self.final = places[final.number]
        self._ops = (Op * len(recorder.ops))(*(self._struct(op, places) for op in recorder.ops))
        offsets = [sum(buffers[:i]) for i in range(len(buffers))]
        self._buffers = (Buffer * len(buffers))(*(Buffer(o, w) for o, w in zip(offsets, buffers)))
        sizes = len(buffers), sum(buffers), len(self.bounds)
        self.program = Program(self._ops, len(self._ops), self._buffers, *sizes)

    def check(self, inputs: Inputs) -> None:
        if self._embeds and inputs.ids is None:
            raise ValueError("the description embeds token ids, but it was run without any")
        if self._places and inputs.layout is None:
            raise ValueError("the description asks for positions or a cache layer, but it was run without a layout")

    def hand_over(self, batch: BatchStruct, inputs: Inputs) -> list[Any]:
        """The named inputs and the bounds it asks for, as arrays of addresses; what is answered must be held."""
        named = [inputs.find(name, width).to(torch.float32).contiguous() for name, width in self.named.items()]
        bounds = [inputs.find(name, None).contiguous() for name in self.bounds]
        arrays = [
            kind(*[tensor.data_ptr() for tensor in tensors]) for kind, tensors in zip(self._addresses, (named, bounds))
        ]
        batch.named, batch.bounds = map(ctypes.addressof, arrays)
        return [named, bounds, arrays]

    @staticmethod
    def _struct(op: dict[str, Any], places: dict[int, int]) -> Op:
        named = {key: places.get(op[key], NOTHING) for key in ("a", "b", "out")}
        return Op(**{**op, **named})


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
