"""Places of fixed size: every row of a round has one."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.cache.slots import Slots
from paceline.models.batch import Shape
from paceline.models.frame import Frame, FrameInput, Size

CPU = torch.device("cpu")


def random_shape(chooser: random.Random) -> tuple[Shape, int]:
    """Sequences that draft, others that sample at the end of prompts of any length, then chunks that do not."""
    drafting = [(1, chooser.randint(1, 9)) for _ in range(chooser.randint(0, 4))]
    sampling = [(chooser.choice([1, 1, 2, 10, 140]), 0) for _ in range(chooser.randint(0, 4))]
    chunks = [(chooser.choice([1, 5, 128, 300]), 0) for _ in range(chooser.randint(0, 2))]
    return tuple(drafting + sampling + chunks), len(drafting) + len(sampling)


@pytest.mark.parametrize("seed", range(200))
def test_every_row_of_a_round_is_looked_at_once(seed: int) -> None:
    shape, num_sampling = (((1, 8), (10, 0), (3, 0)), 3) if seed == 0 else random_shape(random.Random(seed))
    frame, count = Frame(Size.exact(shape, num_sampling), CPU), len(shape)
    given = FrameInput(list(range(count)), [0] * count, [nodes for _, nodes in shape], [False] * count)
    frame.fill(shape, num_sampling, given, Slots(max(count, 1), 16, 1, CPU))
    rows = [
        first + row
        for tiles in frame.tiles
        for first, size in zip(tiles.first.tolist(), tiles.count.tolist())
        for row in range(size)
    ]
    assert sorted(rows) == list(range(sum(map(sum, shape))))
    assert all(count <= tiles.rows for tiles in frame.tiles for count in tiles.count.tolist())
