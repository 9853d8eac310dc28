"""Matrix products in Triton: against float64, and a row's bits whatever is computed with it."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.ops import ACTIVATIONS
from paceline.sampling.verify import argmax
from tests.kernels.triton.products import check, expected, logits_best, make, rows_of, whole

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy of an infinity

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 40, 64), (17, 33, 200)])
def test_a_product_is_that_of_float64_rounded_once(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    from paceline.kernels.triton.matmul import matmul

    rows, columns, depth = shape
    x, weight = rows_of(device, rows, depth, dtype=dtype), rows_of(device, columns, depth, seed=1, dtype=dtype)
    check(matmul(x, weight), expected(x, weight), dtype)


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_bias_gate_and_residual_are_part_of_the_product(
    device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    from paceline.kernels.triton.matmul import Norm, matmul

    x, weight = rows_of(device, rows, 192, dtype=dtype), rows_of(device, 80, 192, seed=1, dtype=dtype)
    norm = Norm(1 + 0.1 * rows_of(device, 192, seed=2, dtype=dtype), 1e-5)
    bias, residual = rows_of(device, 80, seed=3, dtype=dtype), rows_of(device, rows, 90, seed=4, dtype=dtype)
    for around in (
        {"norm": norm},
        {"bias": bias, "residual": residual[:, :80]},
        {"norm": norm, "bias": bias, "gate": "silu", "residual": residual[:, 50:]},
    ):
        check(matmul(x, weight, **around), expected(x, weight, **around), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_every_activation_can_be_the_gate(device: torch.device, gate: str) -> None:
    from paceline.kernels.triton.matmul import matmul

    x, weight = 3 * rows_of(device, 2, 16), rows_of(device, 32, 16, seed=1)
    check(matmul(x, weight, gate=gate), expected(x, weight, gate=gate), torch.float32)


def test_a_row_has_the_same_bits_however_many_are_computed(device: torch.device) -> None:
    from paceline.kernels.triton.matmul import Norm, matmul

    real = device.type == "cuda"
    depth, columns, counts = (1024, 512, (1, 8, 16, 17, 64, 128, 300)) if real else (192, 16, (1, 17, 34))
    x, weight = make(device, counts[-1], depth), make(device, columns, depth, seed=1)
    norm = Norm(make(device, depth, seed=2), 1e-5)
    for around in ({}, {"norm": norm}, {"gate": "silu"}):
        all_rows = matmul(x, weight, **around)  # type: ignore[arg-type]
        for count in counts[:-1]:
            assert torch.equal(matmul(x[:count], weight, **around), all_rows[:count])  # type: ignore[arg-type]


def test_no_tile_changes_a_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Tile

    x, weight = make(device, 18, 256), make(device, 40, 256, seed=1)
    norm = module.Norm(make(device, 256, seed=2), 1e-5)
    bias, residual = make(device, 40, seed=3), make(device, 18, 31, seed=4)[:, 7:27]
    tiles = [Tile(16, 16, 64), Tile(16, 64, 128, warps=8, stages=3), Tile(32, 32, 256, group=1), Tile(128, 64, 64)]
    tiles += [Tile(64, 32, 64, boxes=True), Tile(128, 64, 128, stages=3, boxes=True)]
    tiles += [
        Tile(m, n, k, stages=2, boxes=True, turned=True, ahead=4)
        for m, n, k in ((16, 64, 128), (32, 128, 64), (64, 64, 256))
    ]
    tiles += [Tile(16, 16, 128, boxes=True, lasting=True, group=1)]
    tiles += [Tile(32, 16, 128, warps=2), Tile(16, 16, 128, parts=4)]  # parts are for packed weights alone
    made = []
    for tile in tiles:
        monkeypatch.setattr(module, "find_tile", lambda *given, tile=tile: tile)
        both = module.matmul(x, weight), module.matmul(x, weight, norm=norm, gate="relu")
        more = module.matmul(x, weight, bias, norm, residual, "relu")
        made.append([*both, more, logits_best(x, weight)[1]])
    assert all(torch.equal(one[i], made[0][i]) for one in made for i in range(4))


def test_a_norm_behind_a_product_is_made_of_what_that_leaves(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as of a norm that is made apart, in whatever tiles either product is computed."""
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Tile

    # Values of all sizes: the order of the squares shows in the last bits, also on a CPU.
    x, weight = rows_of(device, 18, 40, dtype=torch.bfloat16), rows_of(device, 300, 40, seed=1, dtype=torch.bfloat16)
    residual, after = (rows_of(device, *shape, seed=3, dtype=torch.bfloat16) for shape in ((18, 320), (32, 300)))
    residual = residual[:, 9:309]
    norm = module.Norm(1 + 0.1 * rows_of(device, 300, seed=2, dtype=torch.bfloat16), 1e-6)
    plain = module.matmul(x, weight, residual=residual)
    apart = module.fold(plain, norm)
    wanted = module.matmul(plain, after, norm=norm), module.matmul(plain, after, norm=norm, gate="silu")
    tiles = [Tile(16, 8, 64), Tile(32, 64, 32, warps=8), Tile(16, 128, 64, group=1)]
    tiles += [Tile(16, 64, 64, boxes=True), Tile(32, 64, 64, boxes=True, turned=True, ahead=4)]
    tiles += [Tile(16, 16, 64, boxes=True, lasting=True, group=1)]
    tiles += [Tile(64, 32, 64), Tile(64, 64, 64), Tile(128, 64, 32, boxes=True)]
    for tile in tiles:
        monkeypatch.setattr(module, "find_tile", lambda *given, tile=tile: tile)
        left = module.room_behind(x, weight, norm)
        assert left is not None
        left.factors.fill_(float("nan"))
        assert torch.equal(module.matmul(x, weight, residual=residual, left=left), plain)
        assert torch.equal(left.scaled, apart.scaled)
        found = module.matmul(left, after), module.matmul(left, after, gate="silu")
        assert all(map(torch.equal, found, wanted))
        assert left.factors.isnan().sum() == 18 * (128 - 38), "so many groups of eight has a row"


@pytest.mark.parametrize("width", [5, 64, 300, 2300])
def test_a_rows_factor_is_that_of_all_its_squares(width: int, device: torch.device) -> None:
    """Added by neighbours, as it is written down; also where a norm's product gets sums of some of them."""
    from paceline.kernels.triton.arithmetic import group_of
    from paceline.kernels.triton.matmul import Folded, Norm, fold, logits

    x, norm = rows_of(device, 2, width, dtype=torch.float32), Norm(torch.ones(width, device=device), 1e-5)
    sums = torch.nn.functional.pad(x * x, (0, (1 << (width - 1).bit_length()) - width))
    groups = sums
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
        groups = sums if x.shape[1] / sums.shape[1] <= group_of(width) else groups
    factors = fold(x, norm).factors
    wanted = torch.rsqrt(sums[:, 0] * torch.tensor(1 / width, dtype=torch.float32) + 1e-5)
    exact = torch.equal if device.type == "cpu" else torch.allclose  # a GPU's rsqrt is its own
    assert exact(factors, wanted)
    assert (factors.double() * (x.double().pow(2).mean(-1) + 1e-5).sqrt() - 1).abs().max() < 1e-6
    one = torch.eye(width, device=device)[:16]
    there = -(-width // group_of(width))
    given = Folded(norm, x, torch.full((2, 128), float("nan"), device=device))
    given.factors[:, :there] = groups[:, :there]
    assert torch.equal(logits(given, one), logits(Folded(norm, x, factors), one))


def test_many_rows_and_narrow_tiles_leave_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Tile

    weight, norm = make(device, 4096, 16), module.Norm(torch.ones(4096, device=device), 1e-6)
    monkeypatch.setattr(module, "find_tile", lambda *given: Tile(16, 32, 64))
    assert module.room_behind(make(device, 257, 16), weight, norm) is None
    left = module.room_behind(make(device, 256, 16), weight, norm)
    assert left is not None and left.scaled.shape == (256, 4096)
    monkeypatch.setattr(module, "find_tile", lambda *given: Tile(16, 16, 64))
    assert module.room_behind(make(device, 64, 16), weight, norm) is None, "sums of 32 neighbours are left"


def test_logits_are_float32_and_the_best_is_the_lowest_of_equals(device: torch.device) -> None:
    from paceline.kernels.triton.matmul import logits

    x, weight = whole(device, 9, 64), whole(device, 150, 64, seed=1)
    weight[140] = weight[3]
    x[4] = weight[3] * 3
    x[5], x[6], x[7, 0] = 0, float("nan"), float("inf")
    made, best = logits_best(x, weight)
    assert made.dtype == torch.float32
    assert torch.equal(made[:6], x[:6].float() @ weight.float().T)
    assert torch.equal(torch.nan_to_num(made, 7.0), torch.nan_to_num(logits(x, weight), 7.0))
    assert torch.equal(best.cpu(), argmax(made.cpu()))
    assert best[[4, 5, 6]].tolist() == [3, 0, -1]


def test_logits_of_many_rows_come_from_tiles_that_end(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Tile

    given: list[Tile] = []
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda *args: (given.append(args[4]), launch(*args))[1])
    x, weight = whole(device, 3, 64), whole(device, 70, 64, seed=1)
    for m in (128, 16):
        tile = Tile(m, 64, 64, boxes=True, lasting=True)
        monkeypatch.setattr(module, "find_tile", lambda *ignored, tile=tile: tile)
        assert torch.equal(module.logits(x, weight), logits_best(x, weight)[0])
    assert [tile.lasting for tile in given] == [False] * 2 + [True] * 2


def test_logits_of_some_rows_are_those_of_all(device: torch.device) -> None:
    from paceline.kernels.triton import matmul as module

    x, weight, picked = make(device, 4, 64), make(device, 70, 64, seed=1), torch.tensor([2, 0, 2], device=device)
    for norm in (None, module.Norm(make(device, 64, seed=2), 1e-5)):
        found = logits_best(x, weight, norm, picked)
        assert all(torch.equal(some, every[picked]) for some, every in zip(found, logits_best(x, weight, norm)))


def test_a_row_with_nothing_above_minus_infinity_has_no_best(device: torch.device) -> None:

    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device).repeat(1, 8)
    weight = torch.zeros(40, 16, device=device)
    weight[:, 0] = float("-inf")
    assert logits_best(x[:1], weight)[1].tolist() == [-1]


def test_rows_apart_in_memory_and_no_rows_at_all(device: torch.device) -> None:
    from paceline.kernels.triton.matmul import matmul

    x, weight = whole(device, 3, 96), whole(device, 16, 32, seed=1)
    assert torch.equal(matmul(x[:, 32:64], weight), matmul(x[:, 32:64].contiguous(), weight))
    assert matmul(x[:0, :32], weight).shape == (0, 16)
    assert logits_best(x[:0, :32], weight)[1].shape == (0,)


def test_what_cannot_be_multiplied_is_refused_in_one_sentence(device: torch.device) -> None:
    from paceline.kernels.triton.matmul import matmul

    x, weight = whole(device, 3, 32), whole(device, 16, 32)
    with pytest.raises(ValueError, match="of one dtype"):
        matmul(x.float(), weight)
    with pytest.raises(ValueError, match="gate must be one of silu, gelu_new"):
        matmul(x, weight, gate="swish")
