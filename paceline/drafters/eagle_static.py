"""Trees of one shape for EAGLE heads: the same places every time, so that all about them is known beforehand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.drafters.static_tree import NODES, TYPED, Ranks, StaticTree, find_tree, tree_of
from paceline.drafters.tree import ROOT
from paceline.errors import OptionError
from paceline.kernels.chain import Branches, Level

# EAGLE-1's, of 25 nodes; and 31 that are met often, on three levels: a level takes about as long as many nodes.
TREES = {
    "static": tree_of("-:4 0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2"),
    "wide": tree_of("-:8 0:4 1:3 2:2 3:1 4:1 00:4 01:2 02:1 10:2 11:1 20:1 30:1"),
}


class Growth(NamedTuple):
    """A level: n children of the P nodes of the level above that have any, parent after parent."""

    counts: tuple[int, ...]  # children of each of the P
    above: Tensor  # [n] whose child each is, among the P
    fed: Tensor  # [W] which of the children have children
    level: Level  # the same as kernels know it


class Shape(NamedTuple):
    """A tree of N nodes, the likelier first; it is drawn level by level."""

    levels: list[Growth]
    parents: Tensor  # [N]
    order: Tensor  # [N] which of the nodes as they are drawn stands where
    counts: Tensor  # [N+1] nodes of a sequence that may have so many: the first up to one whose parent has no line

    @property
    def branches(self) -> Branches:
        """The same as kernels know it."""
        return Branches([growth.level for growth in self.levels], self.counts, self.parents)


def find(given: Any) -> StaticTree:
    """By name, or given as its nodes: the likeliest children of each, for as many are drawn as it has."""
    if isinstance(given, str) and not TYPED.fullmatch(given):
        if given not in TREES:
            raise OptionError(f"tree={given!r} is not allowed; allowed: chain, {', '.join(TREES)}, dynamic, or {NODES}")
        return TREES[given]
    tree = find_tree(given)
    for node in tree.nodes:
        likelier = (*node[:-1], node[-1] - 1)
        if node[-1] and likelier not in tree.nodes:
            raise OptionError(f"tree holds {node}, but not its likelier sister {likelier}")
    return tree


def shapes(tree: StaticTree, device: torch.device) -> list[Shape]:
    """The tree's likeliest part of so many nodes, for each number from 0 on."""
    return [shape_of(tree.first(count), device) for count in range(len(tree.nodes) + 1)]


def shape_of(tree: StaticTree, device: torch.device) -> Shape:
    def send(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    rows: list[Ranks] = [()]  # of the level above, those that have children
    lines: dict[Ranks, int] = {}  # where they lie once they are fed
    numbers = {node: number for number, node in enumerate(tree.nodes)}
    drawn: list[Ranks] = []
    levels: list[Growth] = []
    while rows and tree.nodes:
        children = [sorted(node for node in tree.nodes if node[:-1] == row) for row in rows]
        nodes = [node for some in children for node in some]
        fed = [node for node in nodes if any(other[:-1] == node for other in tree.nodes)]
        drawn += nodes
        lines |= {node: len(lines) + place for place, node in enumerate(fed)}
        places = {node: (numbers[node], fed.index(node) if node in fed else -1) for node in nodes}
        widest = max(map(len, children))
        seats = [[*(places[node] for node in some), *[(-1, -1)] * (widest - len(some))] for some in children]
        paths = [[lines[node[: 1 + depth]] for depth in range(len(node))] for node in fed]
        above = [place for place, some in enumerate(children) for _ in some]
        level = Level(send(seats), send(paths).view(len(fed), len(levels) + 1))
        levels.append(Growth(tuple(map(len, children)), send(above), send([nodes.index(node) for node in fed]), level))
        rows = fed
    parents = [numbers.get(node[:-1], ROOT) for node in tree.nodes]
    needed = [1 + max(number, 1 + lines.get(node[:-1], -1)) for number, node in enumerate(tree.nodes)]
    counts = [next((n for n, least in enumerate(needed) if least > most), most) for most in range(len(needed) + 1)]
    return Shape(levels, send(parents), send([drawn.index(node) for node in tree.nodes]), send(counts))
