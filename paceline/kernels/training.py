"""A description run under autograd: whole sequences at once, dense attention, no cache.

What a trainer trains is then what is served. Weights are ordinary tensors: the dense matrices that the torch kernels
pack, and the norms and biases beside them. `weights_of` lists them; the caller says which of them want a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.eager import EagerForward, look, split_heads
from paceline.kernels.ops import Describes, Experts, Heads, Hidden, Inputs, Weight


@dataclass
class Sequences:
    """B whole sequences of L positions. Rows see themselves and what stands before them, so padding goes to the end."""

    ids: Tensor | None  # [B, L]
    positions: Tensor  # [B, L]
    named: Mapping[str, Tensor] = field(default_factory=dict)  # [B, L, W]; [B, L] of int64 for a bound
    seen: Tensor | None = None  # [B, L, L] bool: of what stands before a row, what it sees; None: all of it
    # Layers that are not the network's own, by number: keys and values, each [B, C, kv heads, D].
    borrowed: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class DenseForward(EagerForward):
    """Rows are the sequences' positions, one sequence after the other."""

    def __init__(self, sequences: Sequences, taps: tuple[int, ...]) -> None:
        ids = None if sequences.ids is None else sequences.ids.flatten()
        named = {name: tensor.flatten(0, 1) for name, tensor in sequences.named.items()}
        super().__init__(Inputs(ids, None, named), (), taps)
        self.sequences, self.shape = sequences, sequences.positions.shape

    @property
    def positions(self) -> Tensor:
        return self.sequences.positions.flatten()

    def embed(self, weight: Weight) -> Tensor:
        return super().embed(_dense(weight))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return super().linear(x, _dense(weight), bias)

    def experts(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        _dense(experts.gate_up), _dense(experts.down)
        return super().experts(x, scores, experts)

    def attention(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        q, k, v = (part.reshape(*self.shape, *part.shape[1:]) for part in split_heads(qkv, heads))
        return self._look(q, k, v, self._seen(window), scale, softcap)

    def _seen(self, window: int | None) -> Tensor:
        positions = self.sequences.positions
        mask = torch.ones(*self.shape, self.shape[1], dtype=torch.bool, device=positions.device).tril()
        if window is not None:
            mask = mask & (positions[:, :, None] - positions[:, None] < window)
        return mask if self.sequences.seen is None else mask & self.sequences.seen

    def per_head(self, x: Tensor, weight: Weight, num_heads: int) -> Tensor:
        return super().per_head(x, _dense(weight), num_heads)

    def latent_attention(
        self, q: Tensor, latent: Tensor, num_heads: int, rank: int, layer: int, scale: float
    ) -> Tensor:
        keys = latent.view(*self.shape, 1, -1)
        return self._look(q.view(*self.shape, num_heads, -1), keys, keys[..., -rank:], self._seen(None), scale, None)

    def cross_attention(
        self, q: Tensor, heads: Heads, layer: int, below: str, scale: float | None = None, softcap: float | None = None
    ) -> Tensor:
        if layer not in self.sequences.borrowed:
            given = ", ".join(map(str, self.sequences.borrowed)) or "none"
            raise ValueError(f"the description looks at cache layer {layer}; borrowed layers given: {given}")
        keys, values = self.sequences.borrowed[layer]
        bound = torch.minimum(self.inputs.find(below, None), self.positions + 1).view(self.shape)
        mask = torch.arange(keys.shape[1], device=bound.device) < bound[:, :, None]
        return self._look(q.reshape(*self.shape, -1, heads.head_dim), keys, values, mask, scale, softcap)

    def _look(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        """[B, L, heads, D] at [B, C, kv heads, D] where mask [B, L, C] lets them; rows that see nothing get zeros."""
        each = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(each, dim=2), v.repeat_interleave(each, dim=2)
        some = mask.any(-1, keepdim=True)
        seeing = (mask | ~some)[:, None]  # such rows look at everything first: a softmax over nothing has no gradient
        out = look(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seeing, scale, softcap)
        return torch.where(some, out.transpose(1, 2).flatten(2), 0).flatten(0, 1)


def run_dense(model: Describes, sequences: Sequences, taps: tuple[int, ...] = ()) -> Hidden:
    """final [B, L, H] and tapped [B, L, H·taps], with their graph where weights or inputs want a gradient."""
    f = DenseForward(sequences, taps)
    hidden = f.finish(model.describe(f))
    tapped = None if hidden.tapped is None else hidden.tapped.view(*f.shape, -1)
    return Hidden(hidden.final.view(*f.shape, -1), tapped)


def weights_of(model: Describes) -> list[Tensor]:
    """Every matrix, norm and bias of a description, each once, in the order of their first use.

    No rope tables, and no biases that experts are chosen by: no gradient reaches them.
    """
    collector: Any = _Collector()
    model.describe(collector)
    return list(collector.found.values())


class _Collector:
    """Answers to every word of `Forward` and keeps the tensors it is given."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def __getattr__(self, word: str) -> Any:
        def take(*arguments: Any, **named: Any) -> Any:
            given = (*arguments, *named.values()) if word != "rope" else ()
            for argument in (arguments[2].gate_up, arguments[2].down) if word == "experts" else given:
                tensor = _dense(argument).data if isinstance(argument, Weight) else argument
                if isinstance(tensor, Tensor):
                    self.found[id(tensor)] = tensor
            return [None] * len(arguments[1]) if word == "split" else None

        return take


def _dense(weight: Weight) -> Weight:
    if not isinstance(weight.data, Tensor):
        raise ValueError("only dense weights can be trained: load the network with kernels='torch'")
    return weight


__all__ = ["DenseForward", "Sequences", "run_dense", "weights_of"]
