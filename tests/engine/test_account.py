"""What was proposed as the host reads it: sizes, depths, and who has children."""

from __future__ import annotations

import random

from paceline.engine.account import Drafted


def test_trees_are_read_as_their_parents_say_whatever_stands_beside_them() -> None:
    """Alike ones one after another, other shapes, empty ones, and nodes that ride along."""
    chooser, above, sizes, scratch = random.Random(3), [], [], []
    for number in range(60):
        size = chooser.randint(0, 7)
        row = [chooser.randint(-1, node - 1) for node in range(size)] + [-2] * (7 - size)
        if number % 3 == 1:
            row, size = above[-1], sizes[-1]
        above.append(row)
        sizes.append(size)
        riding = [node >= 5 for node in range(7)]  # nobody hangs below who does not ride along himself
        scratch.append([riding[node] or (parent >= 0 and riding[parent]) for node, parent in enumerate(row)])
    for beside in (None, scratch):
        read = Drafted.read(("x",), sizes, above, beside, None)
        for row, size in enumerate(sizes):
            real = [node for node in range(size) if beside is None or not beside[row][node]]
            depth = {-1: 0}
            for node in real:
                depth[node] = depth[above[row][node]] + 1
            assert (read.sizes[row], read.depths[row]) == (len(real), max(depth.values()))
            assert read.parents is not None
            assert all((node in read.parents[row]) == any(above[row][n] == node for n in real) for node in range(-1, 7))
