"""The operations a model is written in, and what they share: `Weight`, `Layout`, `Heads`.

A model describes its forward once, as calls on a `Forward`. A set of kernels (`Ops`) runs that description: eagerly on
tensors, or by recording it once and handing it to a library that runs the recorded list in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

FINAL = -1  # the boundary after the last norm: what the vocabulary head reads

# Keys and values, each [cache rows, kv heads, D]. Only kernels read them: inside a head's keys each has its own order.
LayerCache = tuple[Tensor, Tensor]
TOGETHER = 16  # a layer has a multiple of so many rows, since kernels may order so many of a head's keys together


@dataclass
class Weight:
    """A matrix [out, in] as the kernels that made it want it."""

    data: Any
    shape: tuple[int, int]


class Packed(Protocol):
    """A matrix still in a file's quantised blocks."""

    @property
    def kind(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def raw(self) -> Any:
        """[rows, bytes per row]"""
        ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...


@dataclass(frozen=True)
class Heads:
    """How a fused qkv row is cut: query heads, then key heads, then value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Span(NamedTuple):
    """The rows of one sequence inside a batch, on the host."""

    slot: int
    row: int  # its first row
    num_rows: int
    reach: int  # one more than the last linear cache position it touches


@dataclass
class Layout:
    """Where each of T rows finds its keys.

    A sequence's cache is a line of positions cut into pages. Row t sees positions first[t] … positions[t]; those
    below tree_base[t] lie at their own place on the line, and its ancestors among the undecided nodes, by depth, at
    tree_base[t] + path[t, depth]. Without trees (path is None) every position lies at its own place.

        line      0 … base-1 | base  +1  +2  +3        committed | nodes in proposal order
        a row at node 3 with ancestors 0 and 3:  path = [0, 3]
    """

    slots: Tensor  # [T] row of the page table
    positions: Tensor  # [T]
    tree_base: Tensor  # [T]
    path: Tensor | None  # [T, D]; negative beyond the row's own depth
    first: Tensor | None  # [T] lowest visible position; None: 0
    write: Tensor  # [T] cache row where this row's key and value are stored
    page_table: Tensor  # [S, P]
    block_size: int
    spans: list[Span]


@dataclass
class Hidden:
    """A forward's result: the head's input for every row, the boundaries that were tapped, logits of chosen rows."""

    final: Tensor  # [T, H] after the last norm
    tapped: Tensor | None  # [T, H·taps] in the order asked for
    logits: Tensor | None = None  # [R, V] float32
    best: Tensor | None = (
        None  # [R] the lowest id of the largest logit, -1 where none is above -inf; if it cost nothing
    )


@dataclass(frozen=True)
class Head:
    """Which rows' logits a forward should end with."""

    weight: Weight
    rows: Tensor  # [R]


class Forward(Protocol):
    """One forward being described. Values are opaque to the model: tensors [T, …], or places in a recorded list."""

    def embed(self, weight: Weight) -> Any: ...

    def add_positions(self, x: Any, table: Tensor, offset: int) -> Any: ...

    def linear(self, x: Any, weight: Weight, bias: Tensor | None) -> Any: ...

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any: ...

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Any: ...

    def activation(self, x: Any, kind: str) -> Any: ...

    def gated(self, x: Any, kind: str) -> Any:
        """activation(first half) · second half."""
        ...

    def add(self, x: Any, y: Any) -> Any: ...

    def head_norm(self, qkv: Any, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Any: ...

    def rope(self, qkv: Any, heads: Heads, cos: Tensor, sin: Tensor) -> Any:
        """Rotate queries and keys by the rows' positions; cos and sin are [positions, D/2]."""
        ...

    def attention(self, qkv: Any, heads: Heads, layer: int, window: int | None) -> Any:
        """Store keys and values in a cache layer, then let every row look at what it may see."""
        ...

    def tap(self, boundary: int, x: Any) -> None: ...


@dataclass
class Inputs:
    """T rows of tokens, and where each finds its keys."""

    ids: Tensor  # [T]
    layout: Layout


class Describes(Protocol):
    """What a model offers its kernels: its forward in their words."""

    def describe(self, f: Forward) -> Any: ...


class Ops(Protocol):
    name: str

    def pack(self, parts: Sequence[Tensor | Packed], dtype: torch.dtype, device: torch.device) -> Weight:
        """One weight from matrices whose rows are stacked."""
        ...

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden: ...

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        """Move rows of all layers to other rows; all are read before any is written."""
        ...

    def embed(self, weight: Weight, ids: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        """[R, H] → [R, V] float32."""
        ...


def cache_rows(layout: Layout, slots: Tensor, line: Tensor) -> Tensor:
    """Positions on the line of each slot → rows of the cache; slots and line broadcast."""
    pages = layout.page_table[slots, line // layout.block_size]
    return pages * layout.block_size + line % layout.block_size


ACTIVATIONS = ("silu", "gelu_new", "gelu", "relu")


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return torch.nn.functional.silu(x)
    if kind == "relu":
        return torch.relu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if kind == "gelu_new" else "none")


def unpack(parts: Sequence[Tensor | Packed], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stacked rows as one dense matrix."""
    dense = [part if isinstance(part, Tensor) else part.dequantize() for part in parts]
    return torch.cat([part.to(device, dtype) for part in dense]).contiguous()
