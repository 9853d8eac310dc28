"""The reference: every row computed alone, in an order that depends on that row only.

A row is copied to memory of its own before each operation that adds up or approximates, so that its alignment, its
neighbours and the way a vectorised loop is cut cannot reach its result. What is rounded exactly, value by value, is
the same however a loop is cut. Registered with torch.library, since a loop over rows cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.eager import EagerForward, EagerOps, split_kept, widened
from paceline.kernels.experts import route
from paceline.kernels.ops import Experts, Heads, Weight, activate


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([function(row.clone()) for row in x.contiguous()]) if len(x) else x


@torch.library.custom_op("paceline::reference_linear", mutates_args=())
def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0])
    product = _by_row(lambda row: torch.mv(weight, row), x)
    return product if bias is None else product + bias


@reference_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("paceline::reference_attention", mutates_args=())
def reference_attention(
    query: Tensor, keys: Tensor, values: Tensor, lines: list[Tensor], scale: float, softcap: float | None
) -> Tensor:
    """Rows [T, heads, D] against the cache [C, kv heads, D]; lines[t] are the cache rows t sees, by position.

    Values may have another width, which is then the result's.
    """
    rows = []
    for row, seen in zip(query, lines):
        key = keys[seen].float().permute(1, 2, 0).contiguous()  # [kv heads, D, positions]
        value = values[seen].float().transpose(0, 1).contiguous()  # [kv heads, positions, D]
        heads = row.float().reshape(key.shape[0], -1, row.shape[-1]).contiguous()
        scores = torch.matmul(heads, key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.matmul(torch.softmax(scores, dim=-1), value).reshape(row.shape[0], -1))
    return torch.stack(rows).to(query.dtype) if rows else query.new_empty(0, query.shape[1], values.shape[2])


@reference_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, lines: list[Tensor], scale: float, softcap: float | None) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[2])


@torch.library.custom_op("paceline::reference_experts", mutates_args=())
def reference_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Rows [T, H], each through its chosen experts [T, K] in their order, weighed by weights [T, K] of float32."""
    num_experts = len(down) // x.shape[1]
    wide, narrow = (stack.view(num_experts, -1, stack.shape[1]) for stack in (gate_up, down))
    rows = []
    for row, ids, shares in zip(x, chosen.tolist(), weights):
        total = torch.zeros_like(row, dtype=torch.float32)
        for expert, share in zip(ids, shares):
            gate, up = torch.mv(wide[expert], row.clone()).chunk(2)
            total = total + torch.mv(narrow[expert], activate(gate, activation) * up).float() * share
        rows.append(total.to(x.dtype))
    return torch.stack(rows)


@reference_experts.register_fake
def _(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    return torch.empty_like(x)


class Lines(NamedTuple):
    lines: list[Tensor]  # for each row the cache rows it sees, in the order of their positions
    window: int | None


class ReferenceForward(EagerForward):
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        result: Tensor = reference_linear(widened(x, weight), weight.data, bias)
        return result

    def experts(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        routed = [route(row[None].clone(), experts.routing, experts.bias) for row in scores]
        if not routed:
            return torch.empty_like(x)
        chosen, weights = torch.cat([row.ids for row in routed]), torch.cat([row.weights for row in routed])
        stacks = (experts.gate_up.data, experts.down.data)
        result: Tensor = reference_experts(x, chosen, weights, *stacks, experts.activation)
        return result

    def per_head(self, x: Tensor, weight: Weight, num_heads: int) -> Tensor:
        kept, given = split_kept(x, weight, num_heads)
        matrices = weight.data.view(num_heads, -1, weight.shape[1])
        made = [reference_linear(given[:, head], matrix, None) for head, matrix in enumerate(matrices)]
        return torch.cat([kept, torch.stack(made, dim=1)], dim=-1).flatten(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        wide = x.reshape(-1, x.shape[-1]).float()
        total = _by_row(lambda row: row.sum()[None], wide * wide)
        normed = (wide * torch.rsqrt(total / wide.shape[1] + eps)).to(x.dtype) * weight
        return (normed if bias is None else normed + bias).reshape(x.shape)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _by_row(lambda row: torch.nn.functional.layer_norm(row, row.shape, weight, bias, eps), x)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return _by_row(lambda row: activate(row, kind), x)

    def plan(self, heads: Heads, window: int | None) -> Lines:
        layout, lines = self.layout, []
        last = layout.positions if layout.until is None else layout.until - 1
        for row, (slot, position, base) in enumerate(
            zip(layout.slots.tolist(), last.tolist(), layout.tree_base.tolist())
        ):
            first = 0 if layout.first is None else int(layout.first[row])
            line = torch.arange(first, position + 1, device=layout.positions.device)
            if layout.path is not None and position >= base:
                nodes = base + layout.path[row, max(first - base, 0) : position + 1 - base]
                line = torch.cat([line[line < base], nodes])
            pages = layout.page_table[slot, line // layout.block_size]
            lines.append(pages * layout.block_size + line % layout.block_size)
        return Lines(lines, window)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: Any, scale: float | None, softcap: float | None
    ) -> Tensor:
        seen = plan.lines if plan.window is None else [line[-plan.window :] for line in plan.lines]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        result: Tensor = reference_attention(query, keys, values, seen, factor, softcap)
        return result


class ReferenceOps(EagerOps):
    name = "reference"
    forward = ReferenceForward

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        result: Tensor = reference_linear(hidden, weight.data, None)
        return result.float()
