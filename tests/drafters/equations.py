"""Drafters' forwards written down densely, row by row of the text, in float64; and a spy on what a drafter proposes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal

State = dict[str, Tensor]


def doubled(state: State, prefix: str = "") -> State:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): t.double() for name, t in state.items() if name.startswith(prefix)}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """[T, heads, D] at positions [T]; the first half of a head turns against the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], dim=-1)


def look(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[T, heads, D] at [C, kv heads, D] where seen [T, C]; a row that sees nothing gets zeros."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("thd,chd->htc", q, k) / q.shape[-1] ** 0.5
    shares = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).nan_to_num(0.0)
    return torch.einsum("htc,chd->thd", shares, v).flatten(1)


def feed_forward(x: Tensor, w: State, eps: float) -> Tensor:
    normed = rms(x, w["post_attention_layernorm.weight"], eps)
    gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
    return x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def keys_and_values(model: Any, text: list[int]) -> list[tuple[Tensor, Tensor]]:
    """What transformers' model caches of a text, for each layer [positions, kv heads, D]; keys are turned."""
    with torch.no_grad():
        cached = model(torch.tensor([text]), use_cache=True).past_key_values
    layers = [(layer.keys, layer.values) for layer in cached.layers]
    return [(k[0].transpose(0, 1).double(), v[0].transpose(0, 1).double()) for k, v in layers]


class Spy:
    """A drafter's config that keeps every proposal: (text, first position it may see, tokens, parents)."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.seen: list[tuple[list[int], int, list[int], list[int]]] = []

    def create(self) -> Any:
        self.made = self.config.create()
        propose = self.made.propose

        def kept(context: Context) -> Proposal:
            table = context.table
            texts = [table.tokens.tensor[s, :n].tolist() for s, n in zip(context.slot_list, context.lengths.tolist())]
            self.before(context)
            proposal: Proposal = propose(context).cut(context.budgets)
            firsts = self.made.first[context.slots].tolist()
            drafts = zip(proposal.tokens.tolist(), proposal.parents.tolist(), proposal.sizes.tolist())
            for text, first, (tokens, parents, size) in zip(texts, firsts, drafts):
                self.seen.append((text, first, tokens[:size], parents[:size]))
            return proposal

        self.made.propose = kept
        return self.made

    def before(self, context: Context) -> None:
        """What is done before each proposal."""
