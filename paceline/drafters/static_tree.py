"""Trees whose shape is known before anything is drafted, as Medusa publishes them: nodes as ranks from the root down.

The node (1, 0) is the likeliest child of the second likeliest child of the root. Knows ranks; must not know how tokens
are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.tree import Proposal
from paceline.errors import OptionError

Ranks = tuple[int, ...]

# How many children the nodes of each published tree have, by their ranks; "-" is the root. All have 63 nodes.
PUBLISHED = {
    "mc_sim_7b_63": "-:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 "
    "00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1 000:2",
    "vicuna_7b_stage2": "-:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 "
    "00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1 002:1 010:1",
    "vicuna_13b_stage2": "-:10 0:10 1:4 2:2 3:1 4:1 5:1 "
    "00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2 002:1 010:1 100:1",
    "vicuna_33b_stage2": "-:10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 "
    "00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3 001:1 010:1",
    "zephyr_stage2": "-:10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1",
}


@dataclass(frozen=True)
class StaticTree:
    """N nodes, parents before children and siblings by rank. Cut anywhere, it keeps its likelier part: the smaller a
    node's ranks and depth together, the earlier it stands."""

    nodes: tuple[Ranks, ...]

    @property
    def parents(self) -> list[int]:
        place = {node: number for number, node in enumerate(self.nodes)}
        return [place[node[:-1]] if len(node) > 1 else -1 for node in self.nodes]

    @property
    def depth(self) -> int:
        return max(map(len, self.nodes))

    def first(self, count: int) -> StaticTree:
        return StaticTree(self.nodes[:count])

    def within(self, vocabulary: int) -> StaticTree:
        """Of so many tokens: no node has more children than that."""
        return StaticTree(tuple(node for node in self.nodes if max(node) < vocabulary))

    def width(self, depth: int) -> int:
        """How many ranks are asked for at a depth, 1 the first."""
        return 1 + max(node[-1] for node in self.nodes if len(node) == depth)


class Seats:
    """Where a tree's nodes stand among tokens that are drawn depth by depth, `places` counted through all of them."""

    def __init__(self, tree: StaticTree, places: list[int], device: torch.device) -> None:
        self.depth, self.num_nodes = tree.depth, len(tree.nodes)
        self._places = torch.tensor(places, device=device)  # [N]
        self._parents = torch.tensor(tree.parents, device=device)  # [N]

    def fill(self, drawn: list[Tensor], most: int, name: str) -> Proposal:
        """The tree of the tokens drawn at each depth, [B, …], at most so many nodes."""
        width = min(most, self.num_nodes)
        tokens = torch.cat([level.flatten(1) for level in drawn], dim=1)[:, self._places[:width]]
        sizes = torch.full_like(tokens[:, 0], width)
        parents = self._parents[:width].expand_as(tokens)
        return Proposal(tokens, parents, sizes, chain=False, names=(name,), max_depth=self.depth)


NODES = "rank tuples such as [(0,), (1,), (0, 0)], typed as 0/1/0.0"
TYPED = re.compile(r"\d+(\.\d+)*(/\d+(\.\d+)*)*")


def find_tree(given: Any) -> StaticTree:
    """A published tree by name, or one that is given as its nodes, which may be typed."""
    if isinstance(given, str):
        if given in PUBLISHED:
            return tree_of(PUBLISHED[given])
        if not TYPED.fullmatch(given):
            raise OptionError(f"tree={given!r} is not known; allowed: {', '.join(PUBLISHED)}, or {NODES}")
        given = [tuple(map(int, node.split("."))) for node in given.split("/")]
    if not isinstance(given, Sequence) or not given or not all(map(_is_node, given)):
        raise OptionError(f"tree={given!r} is not a tree; allowed: {NODES}, or a name")
    nodes = [tuple(node) for node in given]
    for node in nodes:
        if nodes.count(node) > 1:
            raise OptionError(f"tree holds {node} twice; give each node once")
        if len(node) > 1 and node[:-1] not in nodes:
            raise OptionError(f"tree holds {node}, but not the node above it, {node[:-1]}")
    return _in_order(nodes)


def _in_order(nodes: list[Ranks]) -> StaticTree:
    return StaticTree(tuple(sorted(nodes, key=lambda node: (sum(node) + len(node), node))))


def tree_of(counts: str) -> StaticTree:
    """How many children nodes have, by their ranks, as in `PUBLISHED`."""
    nodes: list[Ranks] = []
    for part in counts.split():
        above, _, count = part.partition(":")
        ranks = tuple(int(rank) for rank in above if rank != "-")
        nodes += [(*ranks, rank) for rank in range(int(count))]
    return _in_order(nodes)


def _is_node(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and all(type(rank) is int and rank >= 0 for rank in given)


__all__ = ["PUBLISHED", "Seats", "StaticTree", "find_tree", "tree_of"]
