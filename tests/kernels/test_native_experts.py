"""Experts on the native kernels: packed kinds, many rows, and the same bits whatever runs beside a row."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu.library import SOURCES
from paceline.kernels.cpu.native import NativeOps
from paceline.kernels.ops import Experts, Routing, Weight
from tests.kernels.mixtures import EXPERTS, HIDDEN, ROUTINGS, WIDE, Mixture, by_hand, rows
from tests.kernels.tiny import CPU, packed, paths_built, same_bits

MANY = 160  # rows: some experts have whole panels of sixteen, some few
WIDEST = 256


def mixture_of(kind: str, name: str = "mixtral") -> Mixture:
    """Experts of one kind; the second matrix of each is of another."""
    if kind not in SOURCES:
        return Mixture(name, NativeOps(stored=getattr(torch, kind)))
    other = "Q6_K" if kind != "Q6_K" else "Q8_0"
    between = 256 if kind.endswith("_K") else 128
    wide = [packed(part, between, WIDEST, 7 * e) for e in range(EXPERTS) for part in (kind, other)]
    return Mixture(name, NativeOps(), packed=(wide, [packed(kind, WIDEST, between, 90 + e) for e in range(EXPERTS)]))


def leaning(count: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows most of which choose the same few experts."""
    x, scores = rows(count, seed, width)
    return x, scores + torch.tensor([2.0, 0, 0, 1.5, 0, -9, 0, 0])


@pytest.mark.parametrize("kind", [*SOURCES, "float32", "bfloat16", "float16"])
def test_packed_experts_are_near_what_they_are_packed_from(kind: str) -> None:
    mixture = mixture_of(kind)
    x, scores = leaning(MANY, mixture.width)
    found, wanted = mixture.run(x, scores), by_hand(mixture, x, scores)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()
    assert wanted.std() > 1e-4


@pytest.mark.parametrize("kind", [*SOURCES, "float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch_on_any_path_with_any_threads(
    kind: str, select: Callable[[str], None], threads: Callable[[int], None]
) -> None:
    mixture = mixture_of(kind, "groups")
    x, scores = leaning(MANY, mixture.width)
    select("portable")
    wanted = torch.cat([mixture.run(x[r : r + 1], scores[r : r + 1]) for r in range(MANY)])
    for path in paths_built():
        select(path)
        for count in (1, 3):
            threads(count)
            for some in (1, 5, 17, MANY):
                found = [mixture.run(x[at : at + some], scores[at : at + some]) for at in range(0, MANY, some)]
                assert same_bits(torch.cat(found), wanted), (path, count, some)
            order = torch.randperm(MANY, generator=torch.Generator().manual_seed(count))
            assert same_bits(mixture.run(x[order], scores[order]), wanted[order]), (path, count)


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_are_those_of_the_other_kernels_where_scores_are_equal(name: str) -> None:
    mixture = Mixture(name, NativeOps())
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(0, 3, (4, EXPERTS), generator=generator).float()
        mixture.bias = mixture.experts.bias = None
        x = torch.randn(4, HIDDEN, generator=generator)
        assert (mixture.run(x, scores) - by_hand(mixture, x, scores)).abs().max() <= 1e-4


def test_scores_that_are_no_number_spoil_their_own_row_alone() -> None:
    for name in ROUTINGS:
        mixture = Mixture(name, NativeOps())
        x, scores = rows(5)
        whole = mixture.run(x, scores)
        scores[1], scores[3, 2] = torch.nan, torch.nan
        found = mixture.run(x, scores)
        assert same_bits(found[[0, 2, 4]], whole[[0, 2, 4]])
        assert found[1].isnan().all()


UNREAD = """
import torch
from paceline.kernels.cpu.native import NativeOps
from tests.kernels.mixtures import EXPERTS, Mixture, rows

mixture = Mixture("mixtral", NativeOps())
x, scores = rows(40)
scores[:, [1, 6]] = -9
wanted = mixture.run(x, scores)
for weight in (mixture.experts.gate_up, mixture.experts.down):
    each = len(weight.data.segments) // EXPERTS
    for expert in (1, 6):
        for number in range(each):
            weight.data._array[expert * each + number].data = 64  # nobody's memory: to read it is to crash
assert torch.equal(mixture.run(x, scores), wanted)
print("not read")
scores[7, 6] = 9
mixture.run(x, scores)
print("survived")
"""


def test_an_expert_that_no_row_chose_is_not_read() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", UNREAD], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout == "not read\n" and done.returncode < 0, done.stderr


def stack(count: int, out: int, columns: int) -> Weight:
    return NativeOps().pack([torch.ones(out, columns)] * count, torch.float32, CPU)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few gates": ({"gate_up": stack(EXPERTS, WIDE, HIDDEN)}, "gate_up of"),
    "uneven gates": ({"gate_up": stack(1, EXPERTS * 2 * WIDE, HIDDEN)}, "gate_up of"),
    "another width": ({"gate_up": stack(2 * EXPERTS, WIDE, HIDDEN + 1)}, "gate_up of"),
    "too many downs": ({"down": stack(EXPERTS + 1, HIDDEN, WIDE)}, "down of"),
    "none chosen": ({"routing": Routing(0, "softmax", True)}, "num_chosen=0"),
    "more chosen than there are": ({"routing": Routing(9, "softmax", True)}, "num_chosen=9"),
    "more chosen than groups have": ({"routing": Routing(5, "sigmoid", True, 1.0, 4, 2)}, "num_chosen=5"),
    "groups of no size": ({"routing": Routing(1, "sigmoid", True, 1.0, 3, 2)}, "num_groups=3"),
    "a bias for others": ({"bias": torch.ones(3)}, "bias"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_be_read_beyond_its_end_is_refused(why: str) -> None:
    changes, named = REFUSED[why]
    mixture = Mixture("mixtral", NativeOps())
    mixture.experts = Experts(**{**vars(mixture.experts), **changes})
    with pytest.raises(ValueError, match=named):
        mixture.run(*rows(2))
