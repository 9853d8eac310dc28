"""Trees as parents arrays: depths and paths against a walk from each node up to the root."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.drafters.tree import PADDING, ROOT, depths, paths


def ancestors(parents: list[int], node: int) -> list[int]:
    """From the root's child down to the node; nothing for padding."""
    if parents[node] == PADDING:
        return []
    line = [node]
    while parents[line[0]] != ROOT:
        line.insert(0, parents[line[0]])
    return line


def test_the_tree_of_the_picture() -> None:
    parents = torch.tensor([[-1, -1, 0, 0, 2, PADDING]])
    assert depths(parents).tolist() == [[1, 1, 2, 2, 3, 0]]
    wanted = [[0, -2, -2], [1, -2, -2], [0, 2, -2], [0, 3, -2], [0, 2, 4], [-2, -2, -2]]
    assert paths(parents, max_depth=3).tolist() == [wanted]


@pytest.mark.parametrize("seed", range(4))
def test_depths_and_paths_are_those_of_a_walk_upwards(seed: int) -> None:
    chooser, nodes = random.Random(seed), 11
    trees = []
    for size in (11, 6, 0, 1):
        trees.append([chooser.randrange(-1, node) for node in range(size)] + [PADDING] * (nodes - size))
    parents = torch.tensor(trees)
    lines = [[ancestors(tree, node) for node in range(nodes)] for tree in trees]
    assert depths(parents).tolist() == [[len(line) for line in row] for row in lines]
    deepest = max(len(line) for row in lines for line in row)
    for width, given in ((nodes, None), (deepest, deepest)):
        wanted = [[line + [PADDING] * (width - len(line)) for line in row] for row in lines]
        assert paths(parents, given).tolist() == wanted


def test_no_nodes_have_no_paths() -> None:
    assert paths(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 0)
