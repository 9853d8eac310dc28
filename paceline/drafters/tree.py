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

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from paceline.kernels.chain import Drafts
from paceline.kernels.rounds import Rounds

ROOT = -1
PADDING = -2  # the parent of a node that is not there


@dataclass
class Proposal:
    """What a drafter proposes for B sequences, at most N nodes each, in target ids. Nobody writes into one."""

    tokens: Tensor  # [B, N]
    above: Tensor | None  # [B, N] the parents; None: a chain's, made when they are asked for
    sizes: Tensor  # [B]
    chain: bool  # every node's parent is the node before it
    probs: Tensor | None = None  # [B, N, V]: the distribution a token was DRAWN from; None: chosen, not drawn
    scratch: Tensor | None = None  # [B, N] bool: nodes that ride along but may not be accepted
    names: tuple[str, ...] = ()  # the drafters that had a part in it
    origins: Tensor | None = None  # [B, N] index into `names`; None: all from names[0]
    max_depth: int | None = None  # no node is deeper; None: N
    _sizes: list[int] | None = field(default=None, init=False, repr=False, compare=False)

    @cached_property
    def parents(self) -> Tensor:
        """[B, N]; ROOT is the last committed token, PADDING marks nodes past `sizes`."""
        if self.above is not None:
            return self.above
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        return torch.where(index < self.sizes[:, None], index - 1, PADDING)

    @property
    def size_list(self) -> list[int]:
        """On the host, which waits for the device."""
        if self._sizes is None:  # kept by hand: every round asks several times, and a cached_property takes a lock
            self._sizes = self.sizes.tolist()
        return self._sizes

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[1])

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(nothing, None, torch.zeros(batch, dtype=torch.int64, device=device), chain=True)

    @classmethod
    def of_chains(cls, tokens: Tensor, sizes: Tensor, name: str, probs: Tensor | None = None) -> Proposal:
        """One chain a sequence: the first sizes[b] of tokens[b]."""
        return cls(tokens, None, sizes, True, probs, names=(name,))

    @classmethod
    def of_drafts(cls, drafts: Drafts, name: str) -> Proposal:
        """As kernels drew them; of a tree of one shape what is beyond its size is not cut off."""
        tokens, sizes, parents, depth = drafts
        if parents is None:
            return cls.of_chains(tokens, sizes, name)
        return cls(tokens, parents.expand_as(tokens), sizes, False, names=(name,), max_depth=depth)

    @classmethod
    def of_texts(cls, texts: list[list[int]], device: torch.device, name: str) -> Proposal:
        """One chain a sequence, from token lists on the host."""
        sizes = [len(text) for text in texts]
        nodes = max(sizes, default=0)
        rows = [[*text, *[0] * (nodes - len(text)), len(text)] for text in texts]
        sent = torch.tensor(rows, dtype=torch.int64).view(len(texts), nodes + 1).to(device)
        return cls.of_chains(sent[:, :-1], sent[:, -1], name)

    @classmethod
    def of_trees(cls, trees: list[tuple[list[int], list[int]]], device: torch.device, name: str) -> Proposal:
        """From (tokens, parents) lists on the host, one pair a sequence."""
        sizes = [len(tokens) for tokens, _ in trees]
        nodes, chain, deepest = max(sizes, default=0), True, 0
        rows: list[list[int]] = []  # tokens, then parents
        for (ids, above), size in zip(trees, sizes):
            check_parents(above)
            straight = above == list(range(-1, size - 1))
            deepest = max(deepest, size if straight else _deepest(above))
            chain = chain and straight
            rows.append(ids + [0] * (nodes - size))
        rows += [above + [PADDING] * (nodes - size) for (_, above), size in zip(trees, sizes)]
        sent = torch.tensor(rows, dtype=torch.int64).view(2, len(trees), nodes).to(device)
        counts = torch.tensor(sizes, dtype=torch.int64).to(device)
        return cls(sent[0], sent[1], counts, chain, names=(name,), max_depth=deepest)

    def cut(self, budgets: Tensor) -> Proposal:
        """The same trees with at most budgets[b] nodes: a prefix of a tree is a tree."""
        if self.num_nodes == 0:
            return self
        sizes, above = torch.minimum(self.sizes, budgets), self.above
        if above is not None:
            index = torch.arange(self.num_nodes, device=self.tokens.device)
            above = torch.where(index < sizes[:, None], above, PADDING)
        return replace(self, sizes=sizes, above=above)

    def narrow(self, width: int) -> Proposal:
        """The same where no tree has more than `width` nodes: without what is padding in all."""
        if self.num_nodes <= width:
            return self
        above, probs, scratch, origins = (
            None if one is None else one[:, :width] for one in (self.above, self.probs, self.scratch, self.origins)
        )
        tokens = self.tokens[:, :width]
        return replace(self, tokens=tokens, above=above, probs=probs, scratch=scratch, origins=origins)

    def widen(self, width: int) -> Proposal:
        """The same in as many places as a round has for nodes, those behind them padding."""
        more = width - self.num_nodes
        if more <= 0 or not self.num_nodes:  # where there is nothing at all, there are no places either
            return self

        def pad(part: Tensor | None, value: int = 0) -> Tensor | None:
            behind = (0, 0) * (0 if part is None else part.dim() - 2)
            return None if part is None else torch.nn.functional.pad(part, (*behind, 0, more), value=value)

        tokens, above = pad(self.tokens), pad(self.above, PADDING)
        assert tokens is not None
        probs, scratch, origins = pad(self.probs), pad(self.scratch), pad(self.origins)
        return replace(self, tokens=tokens, above=above, probs=probs, scratch=scratch, origins=origins)

    def only(self, kept: Tensor, width: int) -> Proposal:
        """The nodes that are kept [B, N], as they stood, the first `width` of them; above a kept node all are kept."""
        nodes = torch.argsort((~kept).to(torch.int8), dim=1, stable=True)[:, :width]  # [B, width]
        above = self.parents.gather(1, nodes)
        moved = torch.where(above >= 0, (kept.cumsum(1) - 1).gather(1, above.clamp(min=0)), above)
        sizes = kept.sum(1).clamp(max=width)
        parents = torch.where(torch.arange(nodes.shape[1], device=nodes.device) < sizes[:, None], moved, PADDING)
        probs = self.probs
        if probs is not None:
            probs = probs.gather(1, nodes[:, :, None].expand(-1, -1, probs.shape[2]))
        return replace(self, tokens=self.tokens.gather(1, nodes), above=parents, sizes=sizes, probs=probs)

    def paths(self, rounds: Rounds | None = None) -> Tensor | None:
        """[B, N, D]: for each node its ancestors by depth, itself last; None for chains."""
        return None if self.chain else paths(self.parents, self.max_depth, rounds)


def check_parents(parents: list[int]) -> None:
    """Parents come before children; nothing hangs in the air."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; a parent is {ROOT} or an earlier node")


def _deepest(parents: list[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else 1 + depths[parent])
    return max(depths, default=0)


def depths(parents: Tensor) -> Tensor:
    """[B, N] → [B, N]: 1 for children of the root; 0 for padding."""
    return (_lineage(parents, parents.shape[1]) >= 0).sum(2)


def paths(parents: Tensor, max_depth: int | None = None, rounds: Rounds | None = None) -> Tensor:
    """[B, N] → [B, N, D]: for each node its ancestors by depth, itself last; PADDING (-2) beyond its own depth."""
    nodes = parents.shape[1]
    deepest = nodes if max_depth is None else min(max_depth, nodes)
    if rounds is not None and deepest:
        return rounds.paths(parents, deepest)
    line = _lineage(parents, deepest)  # [B, N, D]
    depth = (line >= 0).sum(2, keepdim=True)
    back = depth - 1 - torch.arange(line.shape[2], device=parents.device)
    return torch.where(back >= 0, line.gather(2, back.clamp(min=0)), PADDING)


def _lineage(parents: Tensor, max_depth: int) -> Tensor:
    """[B, N] → [B, N, D]: each node, its parent, its parent's parent …; negative behind the root, and for padding."""
    own = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    line = [torch.where(parents > PADDING, own, PADDING)]
    for _ in range(max_depth - 1):
        line.append(torch.where(line[-1] >= 0, parents.gather(1, line[-1].clamp(min=0)), PADDING))
    return torch.stack(line, dim=2)[:, :, :max_depth]
