"""Weights of 8 bits in Triton: what a matrix becomes, its products against float64, the same in every tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.kernels import select
from paceline.sampling.verify import argmax
from tests.kernels.triton.products import check, expected, logits_best, make, rows_of, whole

DTYPES = [torch.bfloat16, torch.float16]


def packed(weight: Tensor) -> Any:
    from paceline.kernels.triton.int8 import Int8, round_rows

    made = round_rows(weight)
    assert isinstance(made, Int8)
    return made


def test_a_row_is_rounded_by_its_own_largest_value(device: torch.device) -> None:
    matrix = rows_of(device, 5000, 32, dtype=torch.bfloat16) * torch.logspace(-30, 30, 5000, device=device)[:, None]
    matrix = matrix.to(torch.bfloat16)
    matrix[3] = 0
    matrix[4] = 1e-40
    made = packed(matrix)
    largest = matrix.float().abs().amax(1)
    assert made.shape == matrix.shape and made.values.dtype == torch.int8
    assert made.nbytes == matrix.numel() + 4 * len(matrix)
    assert torch.equal(made.scales, largest / 127)
    assert made.scales[3] == 0 and not made.values[3].any()
    away = (made.dense() - matrix.float()).abs().amax(1)
    assert (away <= largest / 254 * 1.001 + 1e-44).all()
    assert (made.values.abs().amax(1)[5:] == 127).all()


def test_what_cannot_be_packed_stays_floats(device: torch.device) -> None:
    from paceline.kernels.triton.int8 import round_rows

    matrix = rows_of(device, 20, 64, dtype=torch.bfloat16)
    for value in (float("nan"), float("inf"), float("-inf")):
        damaged = matrix.clone()
        damaged[7, 9] = value
        assert round_rows(damaged) is damaged
    for other in (matrix.float(), matrix[:, :40].contiguous(), matrix[:0]):
        assert round_rows(other) is other


@pytest.mark.parametrize(("rows", "parts"), [(3, 1), (17, 1), (3, 4), (17, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_float64_and_what_stands_around_it_comes_behind_the_scales(
    device: torch.device, dtype: torch.dtype, rows: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part is a shorter one."""
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.matmul import Norm, matmul
    from paceline.kernels.triton.tiles import Tile

    if parts > 1:
        monkeypatch.setattr(module, "find_tile", lambda *given: Tile(16, 32, 128, parts, parts=parts))
    x, weight = rows_of(device, rows, 208, dtype=dtype), packed(rows_of(device, 80, 208, seed=1, dtype=dtype))
    norm = Norm(1 + 0.1 * rows_of(device, 208, seed=2, dtype=dtype), 1e-5)
    bias, residual = rows_of(device, 80, seed=3, dtype=dtype), rows_of(device, rows, 90, seed=4, dtype=dtype)
    for around in (
        {},
        {"norm": norm},
        {"bias": bias, "residual": residual[:, :80]},
        {"norm": norm, "bias": bias, "gate": "silu", "residual": residual[:, 50:]},
    ):
        check(matmul(x, weight, **around), expected(x, weight.dense(), **around), dtype)  # type: ignore[arg-type]


def test_all_tiles_agree_and_in_none_does_the_number_of_rows_change_a_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device sums by itself tiles agree nearly."""
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Shape, Tile
    from paceline.kernels.triton.tuning import agree

    x, weight = make(device, 18, 256), packed(rows_of(device, 40, 256, seed=1, dtype=torch.bfloat16))
    norm, bias = module.Norm(make(device, 256, seed=2), 1e-5), make(device, 40, seed=3)
    tiles = [Tile(16, 16, 64), Tile(16, 64, 256, warps=8, stages=3), Tile(32, 32, 128)]
    tiles += [Tile(16, 16, 128, parts=4), Tile(16, 32, 256, warps=2, parts=2), Tile(32, 8, 64, parts=4, ahead=4)]
    tiles += [Tile(64, 32, 64, boxes=True), Tile(16, 16, 128, boxes=True, lasting=True, group=1)]  # no boxes of such
    tiles += [Tile(16, 64, 128, stages=2, boxes=True, turned=True, parts=4)]  # boxes are not cut into parts
    tiles += [
        Tile(m, n, k, stages=2, boxes=True, turned=True, ahead=4, lasting=lasting)
        for m, n, k, lasting in ((16, 64, 128, False), (32, 128, 64, True), (64, 64, 256, False))
    ]
    made = []
    for tile in tiles:
        monkeypatch.setattr(module, "find_tile", lambda *given, tile=tile: tile)
        both = module.matmul(x, weight, bias), module.matmul(x, weight, norm=norm, gate="relu")
        best, few = logits_best(x, weight), module.matmul(x[:5], weight, bias)
        assert torch.equal(few, both[0][:5])
        assert torch.equal(best[0], module.logits(x, weight))
        assert torch.equal(best[1].cpu(), argmax(best[0].cpu()))
        made.append([*both, best[0]])
    shape = Shape(40, 256, False, False, packed=device.type == "cuda")
    assert all(agree(one[i], made[0][i], shape) for one in made for i in range(3))
    few = whole(device, 5, 256)
    sums = few.double() @ weight.values.double().T  # exact
    assert torch.equal(module.logits(few, weight), sums.float() * weight.scales)


@pytest.mark.parametrize("parts", [1, 4])
def test_what_a_norm_behind_it_wants_is_left_by_a_packed_product_too(
    device: torch.device, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Tile

    monkeypatch.setattr(module, "find_tile", lambda *given: Tile(16, 16, 64, parts=parts))
    x, weight = make(device, 5, 144), packed(make(device, 48, 144, seed=1))
    norm = module.Norm(make(device, 48, seed=2), 1e-5)
    left = module.room_behind(x, weight, norm)
    assert left is not None
    made = module.matmul(x, weight, residual=make(device, 5, 48, seed=3), left=left)
    apart = make(device, 64, 48, seed=4)
    assert torch.equal(left.scaled, module.fold(made, norm).scaled)
    assert torch.equal(module.matmul(left, apart), module.matmul(made, apart, norm=norm))


def test_boxes_are_left_out_with_all_that_belongs_to_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that last are for boxes alone: rows that have none are all computed still."""
    from paceline.kernels.triton import matmul as module
    from paceline.kernels.triton.tiles import Tile

    x, weight = make(device, 40, 65)[:, :64], make(device, 96, 64, seed=1)
    wanted = module.matmul(x.contiguous(), weight)
    monkeypatch.setattr(module, "find_tile", lambda *given: Tile(16, 16, 64, boxes=True, lasting=True))
    assert torch.equal(module.matmul(x, weight), wanted)


def test_the_fast_kernels_library_has_no_such_product(device: torch.device, tables: Any) -> None:
    from paceline.kernels.triton import library, matmul

    x, weight = make(device, 40, 64), packed(make(device, 32, 64, seed=1))
    assert tables.prefers_library(40, matmul.shape_of(x, weight.dense(), False, None), x.dtype)
    assert torch.equal(library.matmul(x, weight), matmul.matmul(x, weight))


def test_a_packed_product_has_tiles_of_its_own_or_those_of_floats_that_suit_it(
    device: torch.device, tables: Any
) -> None:
    from paceline.kernels.triton.tiles import Shape, Tile, choose, find_tile

    dtype = torch.bfloat16
    shape = Shape(4096, 4096, False, True, True)
    floats = shape._replace(packed=False)
    assert find_tile(8, shape, dtype) == choose(16, shape, dtype)
    tables.measured[16, floats._replace(normed=False), dtype] = Tile(16, 64, 128, boxes=True, turned=True)
    assert find_tile(8, shape, dtype).turned
    tables.measured[16, floats, dtype] = Tile(16, 64, 128, boxes=True)
    assert find_tile(8, shape, dtype) == choose(16, shape, dtype)
    tables.measured[16, shape, dtype] = Tile(16, 8, 512)
    assert find_tile(8, shape, dtype) == Tile(16, 8, 512)
    assert find_tile(8, floats, dtype) == Tile(16, 64, 128, boxes=True)


def test_every_shape_has_packed_tiles_that_fit(device: torch.device) -> None:
    from paceline.kernels.triton.tiles import Shape, choose, suits_packed
    from paceline.kernels.triton.tuning import SHARED, tiles_for

    for n, k in ((6144, 4096), (4096, 14336), (32000, 4096), (960, 576), (33, 112)):
        for rows in (16, 32, 64, 128, 512):
            for gate, normed in ((False, False), (True, True)):
                shape = Shape(n, k, gate, normed, packed=True)
                found = tiles_for(rows, shape, torch.bfloat16)
                assert found[0] == choose(rows, shape, torch.bfloat16) and len(found) <= 48
                cut = [tile.m for tile in found if tile.parts > 1]
                assert set(cut) <= {16} and (cut or n < 500 or rows > 32 or gate)
                for tile in found:
                    assert suits_packed(tile)
                    assert (2 * tile.m + tile.n * shape.halves) * tile.k * tile.stages <= SHARED
                    assert not tile.turned or (tile.boxes and tile.n >= 16 * tile.warps)


def test_tuning_measures_packed_weights(device: torch.device, tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.int8 import Int8
    from paceline.kernels.triton.tiles import Shape, Tile

    shape, seen = Shape(64, 64, True, True, packed=True), list[Any]()
    tiles = [Tile(16, 16, 64), Tile(16, 32, 64)]
    monkeypatch.setattr(tuning, "tiles_for", lambda *given: tiles)
    monkeypatch.setattr(tuning, "prepare", lambda products: None)
    monkeypatch.setattr(tuning, "measure", lambda calls: -len(seen) if seen.append(len(calls)) is None else 0)
    monkeypatch.setattr(tuning, "BEYOND_CACHE", 3 * 2 * 64 * 64)
    tuning.tune([shape], [16], device, torch.bfloat16)
    assert tables.measured[16, shape, torch.bfloat16] == tiles[1]
    assert seen == [3, 3]  # as many weights of half the bytes
    assert all(isinstance(weight, Int8) for weight in tuning.operands(shape, 16, device, torch.bfloat16)[1])
    tuning.try_library([shape], [16], device, torch.bfloat16)
    assert not tables.library


def test_tables_from_before_there_were_such_weights_are_read(device: torch.device) -> None:
    from paceline.kernels.triton.tiles import Shape
    from paceline.kernels.triton.tuning import _key

    assert _key(16, [64, 32, True, False], "torch.bfloat16")[1] == Shape(64, 32, True, False, packed=False)
    assert _key(16, [64, 32, True, False, True], "torch.bfloat16")[1].packed


def test_only_matrices_of_products_are_packed_and_only_a_drafters(device: torch.device) -> None:
    from paceline.kernels.triton.int8 import Int8

    matrix, dtype = rows_of(device, 32, 64), torch.bfloat16
    ops = select("triton", device, dtype, "int8", drafts=True)
    assert isinstance(ops.pack([matrix, matrix], dtype, device).data, Int8)
    assert ops.pack([matrix, matrix], dtype, device).shape == (64, 64)
    for kept in (
        ops.pack([matrix], dtype, device, picked=True),
        ops.pack([matrix], torch.float32, device, exact=True),
        ops.pack([matrix], torch.float32, device),
        select("triton", device, dtype, drafts=True).pack([matrix], dtype, device),
    ):
        assert isinstance(kept.data, Tensor)
    for method, drafts in (("int8", False), ("int4", True)):
        with pytest.raises(OptionError, match="needs the native kernels"):
            select("triton", device, dtype, method, drafts)
