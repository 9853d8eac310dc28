"""PyTorch's own kernels. Rows of one sequence share one gather of its keys; sequences of like length share one call.

Nothing here waits for the device: shapes come from the host's spans, everything else stays in tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.ops import Layout, Span, Weight, activate, cache_rows

SHARED_ROWS = 64  # spans of more rows (prefill chunks) get a call of their own


@dataclass
class Group:
    """Some spans, padded to one shape: G sequences, R rows, C cache positions."""

    rows: Tensor  # [G, R] rows of the batch; padding repeats a span's first row
    keys: Tensor  # [G, C] rows of the cache
    mask: Tensor  # [G, 1, R·heads per kv head, C] bool


class EagerOps:
    name = "torch"

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.dense, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return activate(x, kind)

    def plan(self, layout: Layout, num_heads: int, num_kv_heads: int, window: int | None) -> list[Group]:
        per_kv_head = num_heads // num_kv_heads
        return [_group(layout, spans, per_kv_head, window) for spans in _alike(layout.spans)]

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, plan: list[Group], scale: float) -> Tensor:
        result = torch.empty_like(query)  # [T, heads, D]
        kv_heads, width = keys.shape[1], keys.shape[2]
        for group in plan:
            sequences, rows = group.rows.shape
            q = query[group.rows].view(sequences, rows, kv_heads, -1, width)
            q = q.permute(0, 2, 1, 3, 4).reshape(sequences, kv_heads, -1, width)  # the heads of a kv head become rows
            k = keys[group.keys].transpose(1, 2)
            v = values[group.keys].transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
            out = out.view(sequences, kv_heads, rows, -1, width).permute(0, 2, 1, 3, 4)
            result[group.rows] = out.reshape(sequences, rows, -1, width)
        return result


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
    return Group(rows, cache_rows(layout, slots, line[None]), mask)


__all__ = ["EagerOps"]
