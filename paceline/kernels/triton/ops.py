"""The operations in Triton: a model's description with what stands beside one another done in one kernel.

A forward is described value by value, and some values need never be there: a norm is folded into the product behind it,
a gate or a residual into the product before it, heads are normed, turned and stored at once, an embedding and a state
are picked, normed and joined. So those values wait (`Embedded`, `Normed`, `Product`, `Turned`) until somebody uses them
otherwise; then they are made. What is made depends on the description alone, and every kernel is row-invariant: so a
row's bits depend on nothing but the row.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.chain import Branches, Chain, Drafts, Growing, Sprout
from paceline.kernels.eager import EagerForward, EagerOps
from paceline.kernels.experts import route
from paceline.kernels.held import hold
from paceline.kernels.ops import (
    FINAL,
    Describes,
    Experts,
    Head,
    Heads,
    Hidden,
    Inputs,
    LayerCache,
    Layout,
    Packed,
    Span,
    Weight,
)
from paceline.kernels.rounds import Rounds
from paceline.kernels.triton import branching, chaining, growing, keeping, library, picking, tuning
from paceline.kernels.triton import experts as expert_kernels
from paceline.kernels.triton import heads as head_kernels
from paceline.kernels.triton import rows as row_kernels
from paceline.kernels.triton.attention import Look, Tiles, attend, tiles_of
from paceline.kernels.triton.compiling import compile_for
from paceline.kernels.triton.device import INTERPRETED
from paceline.kernels.triton.heads import HeadNorms
from paceline.kernels.triton.int8 import Matrix, round_rows
from paceline.kernels.triton.matmul import Bests, Folded, Norm, fold, given_rows, logits_bests, matmul, room_behind
from paceline.kernels.triton.matmul import logits as matmul_logits
from paceline.kernels.triton.per_head import per_head
from paceline.kernels.triton.rounds import TritonRounds

MEASURED = Path(__file__).parent / "measured"  # tiles, a file for each kind of device: see `tuning.py`


class Waiting(ABC):
    """A value that is made when it is asked for, once."""

    made: Tensor | None = None

    def now(self) -> Tensor:
        if self.made is None:
            self.made = self.make()
        return self.made

    @abstractmethod
    def make(self) -> Tensor: ...


@dataclass(eq=False)
class Embedded(Waiting):
    ids: Tensor  # [T]
    table: Tensor

    def make(self) -> Tensor:
        return keeping.pick(self.table, self.ids)

    def folded(self, norm: Norm) -> Folded | None:
        """What a norm makes of it, if it is not made yet: both at once."""
        if self.made is not None or self.table.stride(1) != 1:
            return None
        self.made = self.table.new_empty(len(self.ids), self.table.shape[1])
        return fold(self.table, norm, self.ids, self.made)


@dataclass(eq=False)
class Product(Waiting):
    x: Tensor | Folded
    weight: Matrix
    bias: Tensor | None
    norm: Norm | None
    f: TritonForward

    def make(self, residual: Tensor | None = None, gate: str | None = None, left: Folded | None = None) -> Tensor:
        return self.f.matmul(self.x, self.weight, self.bias, self.norm, residual, gate, left)


@dataclass(eq=False)
class Sum(Waiting):
    """A product and what it is added to. The first norm behind it, if any is asked for before it is made, is made of
    what it leaves."""

    product: Product
    residual: Tensor
    left: Folded | None = None

    def make(self) -> Tensor:
        return self.product.make(self.residual, left=self.left)

    def folded(self, norm: Norm) -> Folded | None:
        if self.made is None:
            self.left = self.product.f.room_behind(self.product.x, self.product.weight, norm)
            self.now()
        return self.left if self.left is not None and self.left.norm is norm else None


@dataclass(eq=False)
class Normed(Waiting):
    source: Tensor | Embedded | Sum
    norm: Norm

    @property
    def x(self) -> Tensor:
        return now(self.source)

    def folded(self) -> Folded | None:
        """What it is made of, where whoever makes its rows leaves that."""
        return None if isinstance(self.source, Tensor) else self.source.folded(self.norm)

    def make(self) -> Tensor:
        return row_kernels.rms_norm(self.x, self.norm.weight, self.norm.eps)


@dataclass(eq=False)
class Turned(Waiting):
    """Heads of fused rows: normed, if there are norms, and turned, if there are angles."""

    qkv: Any
    heads: Heads
    positions: Tensor
    norms: HeadNorms | None = None
    angles: tuple[Tensor, Tensor] | None = None

    def make(self) -> Tensor:
        qkv = now(self.qkv)
        if self.norms is not None:
            qkv = head_kernels.head_norm(qkv, self.heads, *self.norms)
        return qkv if self.angles is None else head_kernels.rope(qkv, self.heads, self.positions, *self.angles)


def now(x: Any) -> Tensor:
    made: Tensor = x.now() if isinstance(x, Waiting) else x
    return made


def _part(x: Any) -> row_kernels.Part:
    """A value as a part of a joined row: made there, if it waits for its embedding or its norm."""
    if isinstance(x, Normed) and x.made is None:
        return _part(x.source)._replace(norm=x.norm)
    if isinstance(x, Embedded) and x.made is None:
        return row_kernels.Part(x.table, x.ids)
    return row_kernels.Part(now(x))


class TritonForward(EagerForward):
    matmul, room_behind = staticmethod(matmul), staticmethod(room_behind)

    def embed(self, weight: Weight) -> Any:
        return super().embed(weight) if self.inputs.ids is None else Embedded(self.inputs.ids, weight.data)

    def linear(self, x: Any, weight: Weight, bias: Tensor | None) -> Any:
        if isinstance(x, Normed) and x.made is None:
            folded = x.folded()
            if x.x.dtype == weight.data.dtype:
                given, norm = (x.x, x.norm) if folded is None else (folded, None)
                return Product(given, weight.data, bias, norm, self)
        rows = now(x)
        rows = rows.to(torch.promote_types(rows.dtype, weight.data.dtype))
        return Product(rows, weight.data, bias, None, self)

    def rms_norm(self, x: Any, weight: Tensor, eps: float, bias: Tensor | None = None) -> Any:
        if bias is not None:
            return row_kernels.rms_norm(now(x), weight, eps, bias)
        return Normed(x if isinstance(x, Embedded | Sum) else now(x), Norm(weight, eps))

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return row_kernels.layer_norm(now(x), weight, bias, eps)

    def activation(self, x: Any, kind: str) -> Tensor:
        return row_kernels.activation(now(x), kind)

    def gated(self, x: Any, kind: str) -> Tensor:
        if isinstance(x, Product) and x.made is None:
            return x.make(gate=kind)
        return row_kernels.gated(now(x), kind)

    def add(self, x: Any, y: Any) -> Any:
        for product, other in ((y, x), (x, y)):
            if isinstance(product, Product) and product.made is None and isinstance(product.x, Tensor):
                rest = now(other)
                if rest.dtype == product.x.dtype and product.norm is None:
                    return Sum(product, rest)
        return now(x) + now(y)

    def head_norm(self, qkv: Any, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Any:
        return Turned(qkv, heads, self.layout.positions, HeadNorms(query, key, eps))

    def rope(self, qkv: Any, heads: Heads, cos: Tensor, sin: Tensor) -> Any:
        if isinstance(qkv, Turned) and qkv.made is None and qkv.angles is None:
            return replace(qkv, angles=(cos, sin))
        return Turned(qkv, heads, self.positions, None, (cos, sin))

    def attention(
        self,
        qkv: Any,
        heads: Heads,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        keys, values = self.caches[layer]
        layout = self.layout if window is None or self.layout.windowed is None else self.layout.windowed
        waiting = qkv if isinstance(qkv, Turned) and qkv.made is None else Turned(qkv, heads, self.positions)
        cos, sin = waiting.angles or (None, None)
        fused = now(waiting.qkv)
        q = head_kernels.turn(fused, heads, self.positions, cos, sin, keys, values, layout.write, waiting.norms)
        look = Look(heads, heads.head_dim**-0.5 if scale is None else scale, softcap, window)
        return attend(q, (keys, values), layout, self._tiles(), look)

    def cross_attention(
        self, q: Any, heads: Heads, layer: int, below: str, scale: float | None = None, softcap: float | None = None
    ) -> Tensor:
        last = torch.minimum(self.inputs.find(below, None), self.positions + 1) - 1
        look = Look(heads, heads.head_dim**-0.5 if scale is None else scale, softcap, None)
        return attend(now(q), self.caches[layer], self.layout, self._tiles(), look, last)

    def latent_attention(self, q: Any, latent: Any, num_heads: int, rank: int, layer: int, scale: float) -> Tensor:
        (keys,) = self.caches[layer]
        rows = now(latent)
        keys.index_copy_(0, self.layout.write, rows[:, None].to(keys.dtype))
        look = Look(Heads(num_heads, 1, rows.shape[1], rank), scale, None, None)
        return attend(now(q), (keys,), self.layout, self._tiles(), look)

    def per_head(self, x: Any, weight: Weight, num_heads: int) -> Tensor:
        return per_head(now(x), weight.data, num_heads)

    def _tiles(self) -> list[Tiles]:
        """Which rows are looked at together."""
        if "tiles" not in self._plans:
            self._plans["tiles"] = find_tiles(self.layout)
        found: list[Tiles] = self._plans["tiles"]
        return found

    def tap(self, boundary: int, x: Any) -> None:
        if boundary in self.taps:
            self.states[boundary] = x  # what waits may go on waiting for the norm behind it

    def tapped(self) -> Tensor | None:
        self.states = {boundary: now(self.states[boundary]) for boundary in self.taps}
        states = [self.states[boundary] for boundary in self.taps]  # one may be asked for twice
        return row_kernels.beside(states) if len(states) > 1 else super().tapped()

    # What is left to PyTorch, of values that are there.

    def add_positions(self, x: Any, table: Tensor, offset: int) -> Tensor:
        return super().add_positions(now(x), table, offset)

    def experts(self, x: Any, scores: Any, experts: Experts) -> Tensor:
        return expert_kernels.mix(now(x), route(now(scores), experts.routing, experts.bias), experts)

    def multiply(self, x: Any, y: Any) -> Tensor:
        return now(x) * now(y)

    def scale(self, x: Any, factor: float) -> Tensor:
        return now(x) * factor

    def concat(self, x: Any, y: Any) -> Tensor:
        one, other = _part(x), _part(y)
        if one.rows.dtype != other.rows.dtype or one.rows.stride(1) != 1 or other.rows.stride(1) != 1:
            return torch.cat([now(x), now(y)], dim=-1)
        both = row_kernels.join(one, other)
        for value, made in zip((x, y), both.split([one.rows.shape[1], other.rows.shape[1]], dim=1)):
            if isinstance(value, Waiting) and value.made is None:
                value.made = made
        return both

    def split(self, x: Any, sizes: Sequence[int]) -> list[Tensor]:
        return [part.contiguous() for part in torch.split(now(x), list(sizes), dim=-1)]


class FastForward(TritonForward):
    """Products may be PyTorch's library's, at the price of row invariance."""

    matmul, room_behind = staticmethod(library.matmul), staticmethod(library.room_behind)


def find_tiles(layout: Layout) -> list[Tiles]:
    if layout.tiles is None:
        return hold(_tiles_of(tuple(layout.spans), layout.positions.device))
    reach = layout.page_table.shape[1] * layout.block_size
    return [Tiles(item.first, item.count, item.rows, reach, None, item.long, item.spare) for item in layout.tiles]


@functools.lru_cache(maxsize=512)
def _tiles_of(spans: tuple[Span, ...], device: torch.device) -> list[Tiles]:
    return tiles_of(spans, device)


class Late(Hidden):
    """A result with logits. What the last norm gives, where it went into the head's product, and each row's best, which
    is found in the keys that product left, are made if they are asked for. So no other is made of one by `replace`."""

    def __init__(self, final: Any, tapped: Tensor | None, logits: Tensor, keys: Bests | None) -> None:
        self._final, self.tapped, self.logits, self.keys = final, tapped, logits, keys

    @property
    def final(self) -> Tensor:  # type: ignore[override]
        return now(self._final)

    @functools.cached_property
    def best(self) -> Tensor | None:  # type: ignore[override]
        return None if self.keys is None else picking.decide(self.keys)


class TritonOps(EagerOps):
    name, chains, trees, captures = "triton", True, True, True
    rounds: Rounds | None = TritonRounds()
    forward = TritonForward

    def __init__(self, device: torch.device, packs: bool = False) -> None:
        """packs: matrices for linear products are kept in 8 bits."""
        self.packs = packs
        for path in sorted(MEASURED.glob("*.json")):
            tuning.load(path, device)

    def pack(
        self,
        parts: Sequence[Tensor | Packed],
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        picked: bool = False,
    ) -> Weight:
        weight = super().pack(parts, dtype, device, exact, picked)
        return replace(weight, data=round_rows(weight.data)) if self.packs and not exact and not picked else weight

    def prepare(self, rounds: Iterable[Callable[[], object]]) -> None:
        if not INTERPRETED:
            compile_for(rounds)

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden:
        f = self.forward(inputs, caches, taps)
        final = model.describe(f)
        if head is None:
            return f.finish(now(final))
        f.states[FINAL] = final
        if isinstance(final, Normed):  # as a part of the head's product, also where somebody asks for what it gives
            folded = final.folded() if head.rows is None else None
            made = _logits(final.x, final.norm, head) if folded is None else _logits(folded, None, head)
        else:
            made = _logits(now(final), None, head)
        return Late(final, f.tapped(), *made)

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        keeping.move(caches, source, target)

    def chain(self, chain: Chain, caches: Sequence[LayerCache]) -> Drafts:
        return chaining.draw(self, chain, caches, logits_bests)

    def tree(self, sprout: Sprout, form: Branches | Growing, caches: Sequence[LayerCache]) -> Drafts:
        if isinstance(form, Branches):
            return branching.draw(self, sprout, form, caches)
        return growing.draw(self, sprout, form, caches)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return matmul_logits(hidden, weight.data)


def _logits(x: Tensor | Folded, norm: Norm | None, head: Head) -> tuple[Tensor, Bests | None]:
    """Those of the rows that are asked for, and the keys that name their best, if anybody asks for it."""
    if head.best:
        return logits_bests(x, head.weight.data, norm, head.rows)
    if head.rows is not None:
        rows = given_rows(x)
        x, norm = rows[head.rows] if norm is None else fold(rows, norm, head.rows), None
    return matmul_logits(x, head.weight.data, norm), None


class FastOps(TritonOps):
    """Which a request's text may depend on: what is computed beside a row can change its last bits."""

    forward = FastForward
