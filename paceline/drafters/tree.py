"""Drafts as trees. A tree is a parents array; a chain is a tree; there is no other encoding.

    node      0   1   2   3   4            root (the last committed token)
    parent   -1  -1   0   0   2           /    \\
                                         0      1
    Parents come before children.       / \\
    Siblings stand in the order        2   3
    they are to be tried.              |
                                       4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1
PADDING = -2  # the parent of a node that is not there


@dataclass
class Proposal:
    """What a drafter proposes for B sequences, at most N nodes each, in target ids."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]; ROOT is the last committed token, PADDING marks nodes past `sizes`
    sizes: Tensor  # [B]
    chain: bool  # every node's parent is the node before it
    probs: Tensor | None = None  # [B, N, V]: the distribution a token was DRAWN from; None: chosen, not drawn
    scratch: Tensor | None = None  # [B, N] bool: nodes that ride along but may not be accepted
    names: tuple[str, ...] = ()  # the drafters that had a part in it
    origins: Tensor | None = None  # [B, N] index into `names`; None: all from names[0]

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[1])

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(nothing, nothing, torch.zeros(batch, dtype=torch.int64, device=device), chain=True)

    @classmethod
    def of_chains(cls, tokens: Tensor, sizes: Tensor, name: str, probs: Tensor | None = None) -> Proposal:
        """One chain a sequence: the first sizes[b] of tokens[b]."""
        batch, nodes = tokens.shape
        index = torch.arange(nodes, device=tokens.device)
        parents = torch.where(index < sizes[:, None], index - 1, PADDING).expand(batch, nodes)
        return cls(tokens, parents, sizes, chain=True, probs=probs, names=(name,))

    @classmethod
    def of_trees(cls, trees: list[tuple[list[int], list[int]]], device: torch.device, name: str) -> Proposal:
        """From (tokens, parents) lists on the host, one pair a sequence."""
        sizes = [len(tokens) for tokens, _ in trees]
        nodes, chain = max(sizes, default=0), True
        rows: list[list[int]] = []  # tokens, then parents
        for (ids, above), size in zip(trees, sizes):
            check_parents(above)
            chain = chain and above == list(range(-1, size - 1))
            rows.append(ids + [0] * (nodes - size))
        rows += [above + [PADDING] * (nodes - size) for (_, above), size in zip(trees, sizes)]
        sent = torch.tensor(rows, dtype=torch.int64).view(2, len(trees), nodes).to(device)
        return cls(sent[0], sent[1], torch.tensor(sizes, dtype=torch.int64).to(device), chain, names=(name,))

    def limited(self, budgets: Tensor) -> Proposal:
        """The same trees cut to at most budgets[b] nodes: a prefix of a tree is a tree."""
        if self.num_nodes == 0:
            return self
        if self.sizes.device.type == "cpu" and all(s <= b for s, b in zip(self.sizes.tolist(), budgets.tolist())):
            return self
        self.sizes = torch.minimum(self.sizes, budgets)
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        self.parents = torch.where(index < self.sizes[:, None], self.parents, PADDING)
        return self


def check_parents(parents: list[int]) -> None:
    """Parents come before children; nothing hangs in the air."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; a parent is {ROOT} or an earlier node")


def depths(parents: Tensor) -> Tensor:
    """[B, N] → [B, N]: 1 for children of the root; 0 for padding."""
    result = torch.zeros_like(parents)
    for node in range(parents.shape[1]):
        above = parents[:, node]
        under = torch.where(above >= 0, result.gather(1, above.clamp(min=0)[:, None])[:, 0], 0)
        result[:, node] = torch.where(above >= ROOT, under + 1, 0)
    return result


def paths(parents: Tensor) -> Tensor:
    """[B, N] → [B, N, D]: for each node its ancestors by depth, itself last; PADDING (-2) beyond its own depth."""
    depth = depths(parents)
    deepest = int(depth.max()) if depth.numel() else 0
    batch, nodes = parents.shape
    result = torch.full((batch, nodes, deepest), PADDING, dtype=torch.int64, device=parents.device)
    for node in range(nodes):
        above = parents[:, node]
        inherited = result.gather(1, above.clamp(min=0)[:, None, None].expand(batch, 1, deepest))[:, 0]
        row = torch.where((above >= 0)[:, None], inherited, PADDING)
        here = torch.arange(deepest, device=parents.device) == (depth[:, node] - 1)[:, None]
        result[:, node] = torch.where(here, node, row)
    return result
