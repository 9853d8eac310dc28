"""Experts on PyTorch's kernels: which of them a row goes through, and what they make of it.

Choosing is shared by all kernels that work on tensors. Nothing here waits for a device: only on a CPU do shapes depend
on what was chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.ops import Experts, Routing, activate

BEST = 2  # a group is worth the sum of so many of its best scores


class Chosen(NamedTuple):
    ids: Tensor  # [T, K] in ascending order
    weights: Tensor  # [T, K] float32


def route(scores: Tensor, routing: Routing, bias: Tensor | None) -> Chosen:
    """The experts of every row by the router's output [T, E]."""
    wide = scores.float()
    own = torch.softmax(wide, dim=-1) if routing.scoring == "softmax" else torch.sigmoid(wide)
    judged = own if bias is None else own + bias.float()
    if routing.kept_groups < routing.num_groups:
        groups = judged.view(len(judged), routing.num_groups, -1)  # [T, G, E/G]
        best = _largest(groups, min(BEST, groups.shape[-1])).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept = kept.scatter(1, _largest(best, routing.kept_groups).indices, True)
        judged = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = _largest(judged, routing.num_chosen).indices.sort(dim=-1).values
    weights = own.gather(1, ids)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Chosen(ids, weights * routing.factor)


class _Sorted(NamedTuple):
    values: Tensor
    indices: Tensor


def _largest(x: Tensor, count: int) -> _Sorted:
    """Along the last dimension; of equals the first, which torch.topk does not promise."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return _Sorted(values[..., :count], indices[..., :count])


def mix(x: Tensor, chosen: Chosen, experts: Experts) -> Tensor:
    """The chosen experts' results for rows [T, H], weighed and summed in ascending order."""
    num_experts = experts.down.shape[0] // x.shape[1]
    stacks = (weight.data.view(num_experts, -1, weight.shape[1]) for weight in (experts.gate_up, experts.down))
    gate_up, down = stacks  # [E, 2I, H], [E, H, I]
    if x.device.type == "cpu":
        return _by_expert(x, chosen, gate_up, down, experts.activation)
    if chosen.ids.numel() <= num_experts:
        return _by_row(x, chosen, gate_up, down, experts.activation)
    return _by_all(x, chosen, gate_up, down, experts.activation)


def _gated(wide: Tensor, activation: str) -> Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return activate(gate, activation) * up


def _by_expert(x: Tensor, chosen: Chosen, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Every expert once, for the rows that chose it."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in sorted(set(chosen.ids.flatten().tolist())):
        rows, places = torch.where(chosen.ids == expert)
        result = F.linear(_gated(F.linear(x[rows], gate_up[expert]), activation), down[expert])
        total = total.index_add(0, rows, result.float() * chosen.weights[rows, places, None])
    return total.to(x.dtype)


def _by_row(x: Tensor, chosen: Chosen, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Every row's experts gathered: few rows, and shapes that do not depend on what was chosen."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for ids, weights in zip(chosen.ids.unbind(1), chosen.weights.unbind(1)):
        wide = torch.bmm(gate_up[ids], x[..., None])[..., 0]
        result = torch.bmm(down[ids], _gated(wide, activation)[..., None])[..., 0]
        total = total + result.float() * weights[:, None]
    return total.to(x.dtype)


def _by_all(x: Tensor, chosen: Chosen, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Every expert for every row, and what was not chosen left out: many rows, and shapes that depend on nothing."""
    shares = torch.zeros(len(x), len(down), device=x.device).scatter(1, chosen.ids, chosen.weights)
    picked = torch.zeros_like(shares, dtype=torch.bool).scatter(1, chosen.ids, True)
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(down)):
        result = F.linear(_gated(F.linear(x, gate_up[expert]), activation), down[expert])
        part = result.float() * shares[:, expert, None]
        total = torch.where(picked[:, expert, None], total + part, total)
    return total.to(x.dtype)
