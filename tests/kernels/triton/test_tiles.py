"""Which tile a product gets: by the rule, by measuring, from a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

SHAPES = [(6144, 4096), (4096, 14336), (128256, 4096), (960, 576), (576, 1536), (33, 100)]
BUCKETS = 16, 32, 64, 128, 256, 512, 2048


@pytest.fixture
def table(tables: Any) -> Any:
    """The table of measured tiles, empty."""
    return tables.measured


def test_rows_share_a_tile_by_powers_of_two(device: torch.device) -> None:
    from paceline.kernels.triton.tiles import bucket

    assert [bucket(rows) for rows in (1, 4, 5, 16, 17, 64, 65, 300, 2048)] == [16, 16, 16, 16, 32, 64, 128, 512, 2048]


def test_every_shape_has_tiles_that_fit(device: torch.device) -> None:
    from paceline.kernels.triton.tiles import Shape, choose
    from paceline.kernels.triton.tuning import SHARED, tiles_for

    for n, k in SHAPES:
        for rows in BUCKETS:
            for gate, normed in ((False, False), (True, False), (False, True), (True, True)):
                shape = Shape(n, k, gate, normed)
                for tile in (choose(rows, shape, torch.bfloat16), *tiles_for(rows, shape, torch.bfloat16)):
                    columns = tile.n * (2 if gate else 1)
                    assert (tile.m + columns) * tile.k * 2 * tile.stages <= SHARED
                    assert min(tile.m, 2 * tile.n, tile.k) >= 16
                    assert not tile.turned or (tile.boxes and tile.n >= 16 * tile.warps)  # 64 rows for each four warps
                    assert not tile.lasting or tile.boxes


def test_fewer_warps_are_tried_where_more_would_do_the_same(device: torch.device) -> None:
    from paceline.kernels.triton.tiles import Shape
    from paceline.kernels.triton.tuning import SLIGHT, tiles_for

    for shape in (Shape(576, 1536, False, False), Shape(960, 576, False, True)):
        fewer = [tile for tile in tiles_for(16, shape, torch.bfloat16) if tile.warps == 2]
        assert fewer and all(tile.m * tile.n <= SLIGHT for tile in fewer)


def test_kinds_of_tiles_can_be_left_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.tiles import Shape

    def kinds(kind: str) -> list[bool]:
        shape = Shape(6144, 4096, False, True)
        return [getattr(tile, kind) for rows in (16, 256) for tile in tuning.tiles_for(rows, shape, torch.bfloat16)]

    for kind in ("turned", "lasting"):
        assert any(kinds(kind))
        monkeypatch.setattr(tuning, "without", {kind})
        assert not any(kinds(kind))
        monkeypatch.setattr(tuning, "without", set())


def test_a_product_with_a_norm_takes_what_was_measured_of_it_alone_if_need_be(device: torch.device, table: Any) -> None:
    from paceline.kernels.triton.tiles import Shape, Tile, choose, find_tile

    shape = Shape(4096, 4096, False, True)
    assert find_tile(3, shape, torch.bfloat16) == choose(16, shape, torch.bfloat16)
    table[16, shape._replace(normed=False), torch.bfloat16] = Tile(16, 16, 64)
    assert find_tile(3, shape, torch.bfloat16) == Tile(16, 16, 64)
    table[16, shape, torch.bfloat16] = Tile(16, 32, 128)
    assert find_tile(3, shape, torch.bfloat16) == Tile(16, 32, 128)


def test_few_rows_are_read_by_many_programs(device: torch.device) -> None:
    from paceline.kernels.triton.tiles import Shape, choose

    for n in (4096, 6144, 14336):
        assert n // choose(16, Shape(n, 4096, False, False), torch.bfloat16).n >= 128


def test_the_fastest_tile_is_kept_in_a_file_and_found_again(
    device: torch.device, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.tiles import Shape, Tile, find_tile

    shape = Shape(4096, 512, False, False)
    wanted = tuning.tiles_for(16, shape, torch.bfloat16)[3]
    times = iter(range(100, 0, -1))
    wrong = tuning.tiles_for(16, shape, torch.bfloat16)[2]
    monkeypatch.setattr(tuning, "prepare", lambda products: None)
    monkeypatch.setattr(tuning, "made_in", lambda tile, *rest: torch.tensor(tile == wrong))
    monkeypatch.setattr(tuning, "_call", lambda x, weight, out, around, tile: tile)
    monkeypatch.setattr(tuning, "measure", lambda calls: {wrong: -2, wanted: -1}.get(calls[0]) or next(times))
    tuning.tune([shape], [16], device, torch.bfloat16)
    assert find_tile(5, shape, torch.bfloat16) == wanted  # the faster one had other bits
    assert find_tile(17, shape, torch.bfloat16) != wanted

    path = tmp_path / "cache" / "tiles.json"
    tuning.save(path, device)
    table.clear()
    assert tuning.load(path, device)
    assert table == {(16, shape, torch.bfloat16): wanted}
    assert isinstance(find_tile(5, shape, torch.bfloat16), Tile)


def test_tiles_that_cannot_be_made_are_passed_over_and_other_errors_are_not(device: torch.device) -> None:
    from triton.runtime.errors import OutOfResources

    from paceline.kernels.triton import tuning

    for error in (OutOfResources(3, 2, "shared memory"), RuntimeError("PassManager::run failed")):
        with tuning._tolerating():
            raise error
    with pytest.raises(RuntimeError, match="illegal"), tuning._tolerating():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_measured_graph_is_long_however_few_weights_there_are(device: torch.device) -> None:
    from paceline.kernels.triton import tuning

    for count in (1, 5, 24, 64):
        numbers = [lambda number=number: number for number in range(count)]  # type: ignore[misc]
        made = [call() for call in tuning.often(numbers)]
        assert len(made) >= tuning.LAUNCHES
        assert made == [*range(count)] * (len(made) // count)


@pytest.mark.parametrize("text", ["", "[]", '{"of": [1, "another", "3"], "tiles": []}', '{"tiles": [1]}'])
def test_a_table_that_does_not_fit_is_left_alone(device: torch.device, table: Any, tmp_path: Path, text: str) -> None:
    from paceline.kernels.triton import tuning

    path = tmp_path / "tiles.json"
    assert not tuning.load(path, device)
    path.write_text(text)
    assert not tuning.load(path, device)
    assert not table


def test_tiles_are_chosen_by_what_they_take_one_behind_another(device: torch.device, table: Any) -> None:
    """A large one is fastest alone, and keeps the next from starting early."""
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.tiles import Shape, Tile

    shapes = [Shape(64, 4096, False, False), Shape(64, 8192, False, False)]
    keys = [(16, shape, torch.bfloat16) for shape in shapes]
    small, middling, large = (Tile(16, 64, 256, stages=stages) for stages in (1, 2, 5))
    alone = {large: 1.0, middling: 1.1, small: 1.2}

    def spend() -> float:
        tiles = [table[key] for key in keys]
        return sum(alone[tile] for tile in tiles) + tiles.count(large) ** 2

    tuning.settle({key: list(alone) for key in keys}, spend)
    assert dict(table) == dict.fromkeys(keys, middling)
    tuning.settle({key: [middling, small] for key in keys}, lambda: 2.2 if table[keys[0]] == middling else 2.199)
    assert dict(table) == dict.fromkeys(keys, middling), "so little may be an accident"


def test_candidates_are_what_there_is_and_the_fastest_in_every_room(
    device: torch.device, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.tiles import Shape, Tile

    one, other = ((16, Shape(64, depth, False, False), torch.bfloat16) for depth in (4096, 8192))
    small, middling, large = (Tile(16, 64, 256, stages=stages) for stages in (1, 2, 5))
    of = {tile: [dataclasses.replace(tile, group=number) for number in range(9)] for tile in (small, middling, large)}
    times = {tile: 10 * size + number for size, tiles in enumerate(of.values()) for number, tile in enumerate(tiles)}
    monkeypatch.setattr(tuning, "timed", {one: dict(reversed(times.items())), other: {small: 1.0}})
    table[one] = usual = Tile(16, 32, 128)
    found = tuning.candidates_for([one, other])
    assert found[other] == [tuning.find_tile(*other), small], "nothing is known of it: the rule's"
    fastest = [tile for tiles in of.values() for tile in tiles[: tuning.BEST]]
    assert found[one] == [usual, *fastest], "so many of the slowest size, too"


def test_lines_are_asked_for_ahead_as_far_as_a_row_goes(device: torch.device, table: Any) -> None:
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.tiles import Shape, Tile

    keys = [(16, Shape(64, 576, False, False, packed), torch.bfloat16) for packed in (False, True)]
    table[keys[0]] = table[keys[1]] = usual = Tile(16, 32, 128, ahead=8)
    found = [tuning.ahead_for(keys)[key] for key in keys]
    assert [[tile.ahead for tile in tiles] for tiles in found] == [[8, 0, 4, 16], [8, 0, 4]], "9 lines, and 5"
    assert {dataclasses.replace(tile, ahead=8) for tiles in found for tile in tiles} == {usual}
