"""MTP's equations written down once more: whole texts at a time, densely, in float64, and no cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.drafters.equations import State, doubled, feed_forward, look, rms, turn
from tests.drafters.tiny_mtp import NAMES

# A module's number, rows [T, H], its tensors and the rows' places [T]: what its decoder layer makes of them.
Layer = Callable[[int, Tensor, State, Tensor], Tensor]


def llama_layer(heads: int, width: int, eps: float, theta: float = 10000.0) -> Layer:
    def run(number: int, x: Tensor, w: State, places: Tensor) -> Tensor:
        normed = rms(x, w["input_layernorm.weight"], eps)
        q, k, v = (
            (normed @ w[f"self_attn.{p}_proj.weight"].T + w.get(f"self_attn.{p}_proj.bias", 0)).view(len(x), -1, width)
            for p in "qkv"
        )
        seen = places[None] <= places[:, None]
        out = look(turn(q, places, theta), turn(k, places, theta), v, seen)
        return feed_forward(x + out @ w["self_attn.o_proj.weight"].T, w, eps)

    return run


@dataclass
class Hand:
    """Modules by hand, for one text. state_first: the fusion reads the state, then the embedding."""

    kind: str
    modules: list[State]  # their tensors, without prefixes
    layer: Layer
    embedding: Tensor
    head: Tensor
    eps: float
    state_first: bool

    def __post_init__(self) -> None:
        self.modules = [doubled(state) for state in self.modules]

    def run(self, number: int, tokens: list[int], states: Tensor, first: int) -> Tensor:
        """What a module gives at the places from `first` on: each reads its token and the state in front of it."""
        w = self.modules[number]
        embedding_norm, state_norm, fusion, last_norm = (f"{name}.weight" for name in NAMES[self.kind][2])
        embedded = w.get("embed_tokens.weight", self.embedding.double())[torch.tensor(tokens)]
        parts = [rms(embedded, w[embedding_norm], self.eps), rms(states.double(), w[state_norm], self.eps)]
        both = torch.cat(parts[::-1] if self.state_first else parts, dim=1)
        x = both @ w[fusion].T + w.get(fusion.replace(".weight", ".bias"), 0)
        x = self.layer(number, x, w, torch.arange(first, first + len(tokens)))
        return rms(x, w[last_norm], self.eps)

    def best(self, number: int, given: Tensor) -> int:
        head = self.modules[number].get("shared_head.head.weight", self.head.double())
        return int((head @ given).argmax())

    def drafts(self, text: list[int], features: Tensor, count: int) -> list[int]:
        """features [n-1, H]: the target's states at all tokens but the newest."""
        length, turns = len(text), len(self.modules)
        truth = [features.double()]  # what each module reads at the places from its number + 1 on
        for number in range(turns):
            given = self.run(number, text[number + 1 :], truth[number], number + 1)
            truth.append(given[:-1])
            if number == 0:
                newest = given[-1:]
        found = [self.best(0, newest[-1])]
        for step in range(1, count):
            number = step % turns
            first = number + 1
            states = torch.cat([truth[number], newest])  # newest: in front of each draft so far
            given = self.run(number, text[first:] + found, states, first)
            newest = given[length - 1 - first :]
            found.append(self.best(number, newest[-1]))
        return found
