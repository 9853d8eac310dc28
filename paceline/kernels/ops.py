"""The operations every set of kernels provides, and the two things they share: `Weight` and `Layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Weight:
    """A matrix [out, in] as a kernel wants it: dense today, packed blocks with the kernels that read them."""

    dense: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.dense.shape[0], self.dense.shape[1])


@dataclass(frozen=True)
class Span:
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


class Ops(Protocol):
    """Rows are [T, …]; `plan` is made once a forward and handed to `attention` of every layer."""

    name: str

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    def activation(self, x: Tensor, kind: str) -> Tensor: ...

    def plan(self, layout: Layout, num_heads: int, num_kv_heads: int, window: int | None) -> Any: ...

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, plan: Any, scale: float) -> Tensor: ...


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
