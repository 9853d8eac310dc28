"""Drafter networks as descriptions, made of the words that target models do not use; each also in plain float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.kernels import Ops, select
from paceline.kernels.ops import Forward, Head, Heads, Hidden, Inputs, LayerCache, LayerSpec
from paceline.models.batch import Batch, Work
from tests.kernels.tiny import CPU, LONGEST, VOCAB, Table

HIDDEN, STATES, EPS = 32, 48, 1e-5


@dataclass(frozen=True)
class Shape:
    """What the words branch on."""

    own: Heads
    target: Heads
    turning: int  # columns of the tables
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


SHAPES = {
    "plain": Shape(Heads(4, 2, 8), Heads(6, 2, 16), 4),
    "capped": Shape(Heads(4, 2, 8), Heads(6, 2, 16), 2, scale=0.7, softcap=1.5),
    "wide": Shape(Heads(4, 1, 64), Heads(6, 3, 128), 16, window=7, scale=0.05, softcap=3.0),
    "narrow": Shape(Heads(3, 3, 6), Heads(4, 4, 64), 1, window=5, scale=0.9),
}


def tables(columns: int, length: int) -> tuple[Tensor, Tensor]:
    turns = torch.outer(torch.arange(length, dtype=torch.float32), 0.7 ** torch.arange(columns, dtype=torch.float32))
    return turns.cos(), turns.sin()


class Glide:
    """States beside tokens, a gate, attention of its own and attention to a target's layer: every word once."""

    def __init__(self, shape: Shape, ops: Ops, longest: int = LONGEST) -> None:
        self.shape, self.ops, self.longest = shape, ops, longest
        self.most_below = longest
        generator = torch.Generator().manual_seed(5)

        def some(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float32)

        own, target = shape.own, shape.target
        sizes = {
            "embedding": (VOCAB, HIDDEN),
            "fusion": (2 * HIDDEN, HIDDEN + STATES),
            "qkv": ((own.num_heads + 2 * own.num_kv_heads) * own.head_dim, HIDDEN),
            "out": (HIDDEN, own.num_heads * own.head_dim),
            "cross_q": (target.num_heads * target.head_dim, HIDDEN),
            "cross_out": (HIDDEN, target.num_heads * target.head_dim),
        }
        self.dense = {name: some(*size) / size[1] ** 0.5 for name, size in sizes.items()}
        self.weights = {name: ops.pack([dense], torch.float32, CPU) for name, dense in self.dense.items()}
        self.head = self.weights["embedding"]
        self.vectors = {"norm": 1 + some(HIDDEN) / 5, "shift": some(HIDDEN) / 5, "fusion": some(2 * HIDDEN) / 5}
        self.tables = tables(shape.turning, longest), tables(target.head_dim // 2, longest)
        self.states = some(VOCAB, STATES)
        sides = (target.num_heads + 2 * target.num_kv_heads) * target.head_dim
        self.target_rows = some(longest, sides)  # what the target's layer holds at each position, as qkv

    def layer_specs(self, dtype: torch.dtype) -> list[LayerSpec]:
        own, target = self.shape.own, self.shape.target
        return [
            LayerSpec.kv(own.num_kv_heads, own.head_dim, dtype, self.shape.window),
            LayerSpec.kv(target.num_kv_heads, target.head_dim, dtype),
        ]

    def describe(self, f: Forward) -> Any:
        own, target, how = self.shape.own, self.shape.target, (self.shape.scale, self.shape.softcap)
        weights, vectors = self.weights, self.vectors
        embedded = f.scale(f.embed(weights["embedding"]), 1.7)
        fused = f.linear(f.concat(embedded, f.input("states", STATES)), weights["fusion"], vectors["fusion"])
        value, gate = f.split(fused, [HIDDEN, HIDDEN])
        x = f.multiply(value, f.activation(gate, "sigmoid"))
        f.tap(0, x)
        normed = f.rms_norm(x, vectors["norm"], EPS, vectors["shift"])
        qkv = f.rope(f.linear(normed, weights["qkv"], None), own, *self.tables[0])
        seen = f.attention(qkv, own, 0, self.shape.window, *how)
        x = f.add(x, f.linear(seen, weights["out"], None))
        alone = Heads(target.num_heads, 0, target.head_dim)
        q = f.rope(f.linear(x, weights["cross_q"], None), alone, *self.tables[1])
        seen = f.cross_attention(q, target, 1, "below", *how)
        return f.add(x, f.linear(seen, weights["cross_out"], None))

    def below(self, positions: Tensor) -> Tensor:
        """Whole blocks of five positions before a row's own; so the first rows see nothing."""
        return (positions // 5 * 5).clamp(max=self.most_below)

    def inputs(self, batch: Batch) -> Inputs:
        named = {"states": self.states[batch.ids], "below": self.below(batch.layout.positions)}
        return Inputs(batch.ids, batch.layout, named)

    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: tuple[int, ...] = (), rows: Tensor | None = None
    ) -> Hidden:
        return self.ops.run(self, self.inputs(batch), caches, taps, None if rows is None else Head(self.head, rows))

    # The same by hand.

    def by_hand(self, ids: list[int]) -> Tensor:
        """Final states of one sequence, in float64."""
        length, own, target = len(ids), self.shape.own, self.shape.target
        dense = {name: matrix.double() for name, matrix in self.dense.items()}
        vectors = {name: vector.double() for name, vector in self.vectors.items()}
        positions = torch.arange(length)
        both = torch.cat([1.7 * dense["embedding"][ids], self.states[ids].double()], dim=1)
        fused = both @ dense["fusion"].T + vectors["fusion"]
        x = fused[:, :HIDDEN] / (1 + torch.exp(-fused[:, HIDDEN:]))
        normed = x / (x.pow(2).mean(1, keepdim=True) + EPS).sqrt() * vectors["norm"] + vectors["shift"]
        q, k, v = cut(normed @ dense["qkv"].T, own)
        q, k = turn(q, *self.tables[0]), turn(k, *self.tables[0])
        back = positions[:, None] - positions
        mask = (back >= 0) & (back < (self.shape.window or length))
        x = x + self._look(q, k, v, mask) @ dense["out"].T
        q = turn((x @ dense["cross_q"].T).view(length, target.num_heads, target.head_dim), *self.tables[1])
        _, k, v = cut(self.target_rows[:length].double(), target)
        return x + self._look(q, k, v, positions < self.below(positions)[:, None]) @ dense["cross_out"].T

    def _look(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        each = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(each, dim=1), v.repeat_interleave(each, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (self.shape.scale or 1 / math.sqrt(q.shape[2]))
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        weights = torch.softmax(scores.masked_fill(~mask, -1e300), dim=-1) * mask.any(1)[:, None]
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def cut(rows: Tensor, heads: Heads) -> list[Tensor]:
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    return list(rows.view(len(rows), sum(sizes), heads.head_dim).split(sizes, dim=1))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first 2·C values of a head, as complex numbers times a turn."""
    half = cos.shape[1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[: len(x), None].cdouble()
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


class Blocks:
    """Two residual blocks on given states, as Medusa's heads are: no tokens, no positions, no cache."""

    def __init__(self, ops: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.dense = [torch.randn(STATES, STATES, generator=generator, dtype=torch.float32) / 7 for _ in range(2)]
        self.weights = [ops.pack([dense], torch.float32, CPU) for dense in self.dense]

    def describe(self, f: Forward) -> Any:
        x = f.input("states", STATES)
        for weight in self.weights:
            x = f.add(x, f.activation(f.linear(x, weight, None), "silu"))
        return x


class Writer:
    """Stores given keys and values in a layer, in whatever order the kernels keep them."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def describe(self, f: Forward) -> Any:
        heads = self.heads
        qkv = f.input("qkv", (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
        return f.attention(qkv, heads, 0, None)


def table_of(name: str, kernels: str, longest: int = LONGEST, num_slots: int = 4) -> Table:
    """Sequences for the network, the target's layer filled for all of them."""
    ops = select(kernels, CPU, torch.float32)
    network = Glide(SHAPES[name], ops, longest)
    table = Table(SimpleNamespace(model=network), num_slots, longest)  # type: ignore[arg-type]
    borrowed = table.cache.layers[1:]
    writer = Writer(network.shape.target)
    for slot in range(num_slots):
        table.begin(slot, [0] * longest)
        batch = table.pack([Work(slot, 0, longest)])
        ops.run(writer, Inputs(None, batch.layout, {"qkv": network.target_rows}), borrowed, (), None)
    return table
