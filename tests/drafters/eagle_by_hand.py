"""EAGLE's equations written down once more, a row at a time in float64, and its trees in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.drafters.tiny_eagle import HEADS, KV_HEADS, WIDTH, Tensors
from tests.fakes import VOCAB

Node = tuple[int, ...]  # the tokens from the root down to it


@dataclass
class Hand:
    """A head by hand, over one text. `flags`: what its config says beyond its tensors."""

    tensors: Tensors
    embedding: Tensor
    head: Tensor
    third: bool
    flags: dict[str, Any] = field(default_factory=dict)
    theta: float = 10000.0

    def __post_init__(self) -> None:
        self.w = {name: tensor.double() for name, tensor in self.tensors.items() if tensor.is_floating_point()}
        self.embedding = self.w.get("embed_tokens.weight", self.embedding.double())
        self.ids = torch.arange(VOCAB)
        if "token_map" in self.tensors:
            self.ids = self.tensors["token_map"]
        if "d2t" in self.tensors:
            self.ids = self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))
        self.cache: list[dict[tuple[int, ...], tuple[Tensor, Tensor]]] = [{}, {}]  # by layer: key and value by place

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.w[name] * x / torch.sqrt((x * x).mean() + 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = self.w[f"{name}.weight"] @ x
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def join(self, states: Tensor) -> Tensor:
        if "input_norm.weight" in self.w:
            states = self.rms(states, "input_norm.weight")
        if "fc_norm.0.weight" in self.w:
            states = torch.cat([self.rms(part, f"fc_norm.{i}.weight") for i, part in enumerate(states.chunk(3))])
        return self.linear(states, "fc") if "fc.weight" in self.w else states

    def row(self, place: int, path: Node, token: int, state: Tensor, joined: bool, first: int = 1) -> Any:
        """(its own state, its logits in target ids). path: its tokens among the drafts; () for a committed pair."""
        w, state = self.w, state.double()
        if self.third:
            z = self.join(state) if joined else state
            normed = self.rms(z, "midlayer.hidden_norm.weight")
            rest = normed if self.flags.get("norm_before_residual") else z
            read = torch.cat([self.rms(self.embedding[token], "midlayer.input_layernorm.weight"), normed])
            x = self.layer("midlayer.", 0, read, rest, (place, path), first)
        else:
            embedded = self.embedding[token]
            if "enorm.weight" in w:
                embedded = self.rms(embedded, "enorm.weight")
            if "hnorm.weight" in w:
                state = self.rms(state, "hnorm.weight")
            x = self.linear(torch.cat([embedded, state]), "fc")
            read = self.rms(x, "layers.0.input_layernorm.weight") if self.flags.get("norms") else x
            x = self.layer("layers.0.", 0, read, x, (place, path), first)
        if "layers.1.self_attn.q_proj.weight" in w:
            x = self.layer("layers.1.", 1, self.rms(x, "layers.1.input_layernorm.weight"), x, (place, path), first)
        final = self.rms(x, "norm.weight") if self.third or self.flags.get("norms") else x
        rows = w["lm_head.weight"] if "lm_head.weight" in w else self.head.double()
        logits = torch.full((VOCAB,), float("-inf"), dtype=torch.float64).index_copy(0, self.ids, rows @ final)
        return (final if self.flags.get("norm_output") or not self.third else x), logits

    def layer(self, name: str, number: int, read: Tensor, rest: Tensor, at: tuple[int, Node], first: int) -> Tensor:
        place, path = at
        q, k, v = (self.linear(read, f"{name}self_attn.{part}_proj").view(-1, WIDTH) for part in "qkv")
        if f"{name}self_attn.q_norm.weight" in self.w:
            q = torch.stack([self.rms(head, f"{name}self_attn.q_norm.weight") for head in q])
            k = torch.stack([self.rms(head, f"{name}self_attn.k_norm.weight") for head in k])
        q, k = self.turn(q, place), self.turn(k, place)
        self.cache[number][(place, *path)] = k, v
        base = place - len(path)
        seen = [(p,) for p in range(first, base + 1)] + [(base + d, *path[:d]) for d in range(1, len(path) + 1)]
        found = [self.cache[number][spot] for spot in seen if spot in self.cache[number]]
        out = []
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            scores = torch.stack([q[head] @ keys[own] for keys, _ in found]) / WIDTH**0.5
            out.append(torch.softmax(scores, 0) @ torch.stack([values[own] for _, values in found]))
        x = rest + self.linear(torch.cat(out), f"{name}self_attn.o_proj")
        u = self.rms(x, f"{name}post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(self.linear(u, f"{name}mlp.gate_proj"))
        return x + self.linear(gate * self.linear(u, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")

    def turn(self, heads: Tensor, place: int) -> Tensor:
        half = WIDTH // 2
        angle = place / self.theta ** (torch.arange(half, dtype=torch.float64) * 2 / WIDTH)
        one, other = heads[:, :half], heads[:, half:]
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], dim=1)

    def read(self, text: list[int], states: Tensor, first: int = 1) -> Any:
        """All pairs of a text; what the newest gave."""
        for place in range(first, len(text)):
            found = self.row(place, (), text[place], states[place - 1], True, first)
        return found

    def chain(self, text: list[int], states: Tensor, count: int) -> list[int]:
        state, logits = self.read(text, states)
        drafts: list[int] = []
        for _ in range(count):
            drafts.append(int(logits.argmax()))
            state, logits = self.row(len(text) + len(drafts) - 1, tuple(drafts), drafts[-1], state, False)
        return drafts

    def parallel(self, text: list[int], states: Tensor, count: int, mask: int) -> list[int]:
        _, logits = self.read(text, states)
        drafts, hidden = [int(logits.argmax())], self.w["mask_hidden"].flatten()
        for number in range(1, count):
            _, logits = self.row(len(text) + number - 1, (mask,) * number, mask, hidden, True)
            drafts.append(int(logits.argmax()))
        return drafts

    def dynamic(self, text: list[int], states: Tensor, top_k: int, depth: int) -> list[tuple[float, Node]]:
        """EAGLE-2's pool, in the order it grows: (score, node)."""
        given = {(): self.read(text, states)}
        frontier, pool = [(0.0, ())], []
        for level in range(depth + 1):
            children = []
            for score, node in frontier:
                chances = torch.log_softmax(given[node][1], 0)
                for token in torch.sort(chances, descending=True, stable=True).indices[:top_k].tolist():
                    children.append((score + float(chances[token]), (*node, token)))
            pool += children
            frontier = sorted(children, key=lambda child: -child[0])[:top_k]
            for _, node in frontier if level < depth else []:
                place = len(text) + len(node) - 1
                given[node] = self.row(place, node, node[-1], given[node[:-1]][0], False)
        return pool

    def static(self, text: list[int], states: Tensor, counts: dict[Node, int]) -> set[Node]:
        """A tree by child counts of nodes, each named by the ranks down to it."""
        given = {(): self.read(text, states)}
        tokens: dict[Node, Node] = {(): ()}
        for ranks, count in counts.items():
            node = tokens[ranks]
            if node:
                given[node] = self.row(len(text) + len(node) - 1, node, node[-1], given[node[:-1]][0], False)
            order = torch.sort(given[node][1], descending=True, stable=True).indices[:count].tolist()
            tokens |= {(*ranks, rank): (*node, token) for rank, token in enumerate(order)}
        return set(tokens.values()) - {()}
