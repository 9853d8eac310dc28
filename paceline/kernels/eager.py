"""PyTorch's own kernels. Rows of one sequence share one gather of its keys; sequences of like length share one call.

Nothing here waits for the device: shapes come from the host's spans, everything else stays in tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.ops import (
    FINAL,
    Describes,
    Head,
    Heads,
    Hidden,
    Inputs,
    LayerCache,
    Layout,
    Packed,
    Span,
    Weight,
    activate,
    cache_rows,
    unpack,
)

SHARED_ROWS = 64  # spans of more rows (prefill chunks) get a call of their own


class EagerForward:
    """A forward carried out at once, on tensors."""

    def __init__(self, ids: Tensor, layout: Layout, caches: Sequence[LayerCache], taps: tuple[int, ...]) -> None:
        self.ids, self.layout, self.caches, self.taps = ids, layout, caches, taps
        self.states: dict[int, Tensor] = {}
        self._plans: dict[int | None, Any] = {}

    def embed(self, weight: Weight) -> Tensor:
        return F.embedding(self.ids, weight.data)

    def add_positions(self, x: Tensor, table: Tensor, offset: int) -> Tensor:
        return x + table[self.layout.positions + offset]

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.data, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return activate(x, kind)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def head_norm(self, qkv: Tensor, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Tensor:
        q, k, v = _split(qkv, heads)
        q, k = self.rms_norm(q, query, eps), self.rms_norm(k, key, eps)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)

    def rope(self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[self.layout.positions][:, None], sin[self.layout.positions][:, None]
        count = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        turned = qkv[:, :count].reshape(len(qkv), -1, heads.head_dim).float()
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
        return torch.cat([turned.flatten(1), qkv[:, count:]], dim=1)

    def attention(self, qkv: Tensor, heads: Heads, layer: int, window: int | None) -> Tensor:
        query, key, value = _split(qkv, heads)
        keys, values = self.caches[layer]
        keys.index_copy_(0, self.layout.write, key.to(keys.dtype))
        values.index_copy_(0, self.layout.write, value.to(values.dtype))
        if window not in self._plans:
            self._plans[window] = self.plan(heads, window)
        return self.attend(query, keys, values, self._plans[window]).reshape(len(qkv), -1)

    def tap(self, boundary: int, x: Tensor) -> None:
        if boundary in self.taps:
            self.states[boundary] = x

    def finish(self, final: Tensor) -> Hidden:
        self.states[FINAL] = final
        return Hidden(final, torch.cat([self.states[tap] for tap in self.taps], dim=-1) if self.taps else None)

    # What other kernels do differently.

    def plan(self, heads: Heads, window: int | None) -> Any:
        """Made once a forward for all layers that see equally far."""
        per_kv_head = heads.num_heads // heads.num_kv_heads
        return [_group(self.layout, spans, per_kv_head, window) for spans in _alike(self.layout.spans)]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        result = torch.empty_like(query)  # [T, heads, D]
        kv_heads, width = keys.shape[1], keys.shape[2]
        for group in plan:
            sequences, rows = group.rows.shape
            q = query[group.rows].view(sequences, rows, kv_heads, -1, width)
            q = q.permute(0, 2, 1, 3, 4).reshape(sequences, kv_heads, -1, width)  # the heads of a kv head become rows
            k = keys[group.keys].transpose(1, 2)
            v = values[group.keys].transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            out = out.view(sequences, kv_heads, rows, -1, width).permute(0, 2, 1, 3, 4)
            result[group.rows] = out.reshape(sequences, rows, -1, width)
        return result


class EagerOps:
    name = "torch"
    forward: type[EagerForward] = EagerForward

    def pack(self, parts: Sequence[Tensor | Packed], dtype: torch.dtype, device: torch.device) -> Weight:
        dense = unpack(parts, dtype, device)
        return Weight(dense, (dense.shape[0], dense.shape[1]))

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden:
        f = self.forward(inputs.ids, inputs.layout, caches, taps)
        hidden = f.finish(model.describe(f))
        if head is not None:
            hidden.logits = self.logits(hidden.final[head.rows], head.weight)
        return hidden

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        for keys, values in caches:
            keys[target] = keys[source]
            values[target] = values[source]

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        return F.embedding(ids, weight.data)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return F.linear(hidden, weight.data).float()


def _split(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(qkv), sum(parts), heads.head_dim), parts, dim=1)
    return q, k, v


@dataclass
class Group:
    """Some spans, padded to one shape: G sequences, R rows, C cache positions."""

    rows: Tensor  # [G, R] rows of the batch; padding repeats a span's first row
    keys: Tensor  # [G, C] rows of the cache
    mask: Tensor  # [G, 1, R·heads per kv head, C] bool


def _alike(spans: list[Span]) -> list[list[Span]]:
    """Spans that waste little when padded to one shape: short ones by the power of two their reach falls under."""
    groups: dict[int, list[Span]] = {}
    for index, span in enumerate(spans):
        key = -1 - index if span.num_rows > SHARED_ROWS else span.reach.bit_length()
        groups.setdefault(key, []).append(span)
    return list(groups.values())


def _group(layout: Layout, spans: list[Span], per_kv_head: int, window: int | None) -> Group:
    device = layout.positions.device
    count = max(span.num_rows for span in spans)
    reach = max(span.reach for span in spans)
    rows = torch.tensor(
        [[span.row + (i if i < span.num_rows else 0) for i in range(count)] for span in spans], dtype=torch.int64
    ).to(device, non_blocking=True)
    slots = layout.slots[rows[:, :1]]  # [G, 1]
    line = torch.arange(reach, device=device)
    positions, base = layout.positions[rows], layout.tree_base[rows]  # [G, R]
    lowest = torch.zeros_like(positions) if layout.first is None else layout.first[rows]
    if window is not None:
        lowest = torch.maximum(lowest, positions - window + 1)
    below = positions + 1 if layout.path is None else torch.minimum(positions + 1, base)
    mask = (line < below[..., None]) & (line >= lowest[..., None])  # [G, R, C]
    if layout.path is not None:
        path = layout.path[rows]  # [G, R, D]
        depth = torch.arange(path.shape[-1], device=device)
        seen = (path >= 0) & (base[..., None] + depth >= lowest[..., None])
        nodes = (base[..., None] + path).clamp(0, reach - 1)
        spots = torch.zeros(*mask.shape[:2], reach, dtype=torch.int64, device=device)
        mask = mask | (spots.scatter_add(2, nodes, seen.long()) > 0)
    mask = mask.repeat_interleave(per_kv_head, dim=1)[:, None]
    # Padding looks at its own sequence's last row, never at another's: 0 · NaN is NaN.
    ends = torch.tensor([[span.reach - 1] for span in spans], dtype=torch.int64).to(device, non_blocking=True)
    return Group(rows, cache_rows(layout, slots, torch.minimum(line[None], ends)), mask)
