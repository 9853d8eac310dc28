"""Picks by the library: temperature, noise and the likeliest, to the bit what tensor operations make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.kernels.chain import Picking
from paceline.kernels.cpu.chain import pick
from paceline.sampling import noise
from paceline.sampling.noise import Keys
from paceline.sampling.verify import argmax
from tests.native import needs_native

pytestmark = needs_native

KEYS = Keys(torch.tensor([3, 1 << 62, -5, 0]), torch.tensor([0, 1, 2, 0]))
POSITIONS = torch.tensor([0, 7, 100_000, 1])
TEMPERATURE = torch.tensor([0.8, 1.0, 2.5, 1.0])
GREEDY = torch.tensor([0, 0, 0, 1])
SLOTS = torch.tensor([2, 0, 3, 1])  # whose columns the rows read


def picking(weight: float = 1.0) -> Picking:
    by_slot = (column[SLOTS.argsort()] for column in (TEMPERATURE, GREEDY, KEYS.seeds, KEYS.samples))
    return Picking(SLOTS, *by_slot, POSITIONS, noise.SAMPLE, None, noise.tables(torch.device("cpu")), weight)


def by_tensors(logits: Tensor, weight: float = 1.0) -> Tensor:
    values = noise._gumbel(KEYS, POSITIONS, noise.SAMPLE, logits.shape[1])
    processed = logits / TEMPERATURE[:, None]
    return argmax(torch.where(GREEDY[:, None] == 0, processed + weight * values, processed))


@pytest.mark.parametrize("path", ["portable", "avx2", "avx512", "amx"])
def test_picks_are_those_of_tensor_operations(
    path: str, select: Callable[[str], None], threads: Callable[[int], None]
) -> None:
    select(path)
    drawn = torch.Generator().manual_seed(1)
    for vocabulary in (1, 97, 4096, 4097, 9001):
        for spread in (0.0, 1.0, 8.0):
            logits = spread * torch.randn(4, vocabulary, generator=drawn)
            for count in (1, 2):
                threads(count)
                assert pick(logits, picking()).tolist() == by_tensors(logits).tolist()


@pytest.mark.parametrize("weight", [0.0, 1e-45, 0.01, 0.7, 1.0])
@pytest.mark.parametrize("far", [0.0, 1e4, -1e4, 3e5, -3e5])
def test_noise_counts_where_sums_are_rounded_coarsely(far: float, weight: float) -> None:
    """Of large logits many sums are equal: also those whose noise is a little less win, if their ids are lower."""
    drawn = torch.Generator().manual_seed(2)
    for _ in range(100):
        logits = far + torch.randn(4, 3000, generator=drawn)
        assert pick(logits, picking(weight)).tolist() == by_tensors(logits, weight).tolist()


def test_of_equal_ones_the_lowest_is_picked_and_of_nothing_none() -> None:
    logits = torch.zeros(4, 50)
    logits[3, [7, 9]] = 1.0
    logits[0] = float("-inf")
    logits[1, 30] = float("nan")
    assert pick(logits, picking())[[0, 1, 3]].tolist() == [-1, -1, 7]
