"""Paged attention in Triton: what each row sees, and that its bits are its own.

Blocks and chunks are small here, so that few positions make many of them.
"""

from __future__ import annotations

import builtins
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.kernels.ops import Heads, Layout
from tests.kernels.triton.layouts import BRANCHES, ONE, Rows, dense, fill, lay, tiles, watch

pytest.importorskip("triton")

MIXED = [Rows(37, 11), Rows(70), Rows(0)]  # a chunk and decoding rows
TREES = [Rows(46, parents=BRANCHES), Rows(14, 4)]
ALL = Heads(4, 2, 16)


def looked(module: Any, layout: Layout, heads: Heads, dtype: torch.dtype = torch.float32, **rest: Any) -> None:
    """The kernels against float64, over all rows of a layout."""
    q, cache = fill(layout, heads, dtype, exact=False)
    look = module.Look(heads, heads.head_dim**-0.5, rest.get("softcap"), rest.get("window"))
    given = tiles(module, layout, rest.pop("rows", 7), rest.pop("splits", 1))
    wanted = dense(q, cache, layout, heads, look.scale, **rest)
    found = module.attend(q, cache, layout, given, look)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() <= (2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("heads", [Heads(3, 1, 64), Heads(4, 1, 80), Heads(8, 1, 128, 48), Heads(4, 2, 8)], ids=str)
def test_heads_of_every_width_and_group_see_their_positions(attention: Any, device: torch.device, heads: Heads) -> None:
    looked(attention, lay(MIXED[:2], device), heads)


@pytest.mark.parametrize("sequences", [MIXED, TREES], ids=["chunks", "trees"])
@pytest.mark.parametrize(
    "rest", [{}, {"window": 20, "softcap": 1.5}, {"window": 20, "splits": 3}, {"splits": 3}, {"rows": 40}], ids=str
)
def test_a_row_sees_what_the_layout_lets_it_see(
    attention: Any, device: torch.device, sequences: list[Rows], rest: dict[str, Any]
) -> None:
    looked(attention, lay(sequences, device), ONE if rest else ALL, **rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_summed_in_float32(attention: Any, device: torch.device, dtype: torch.dtype) -> None:
    looked(attention, lay(TREES, device), ONE, dtype)


def test_a_row_sees_nothing_before_its_first_position(attention: Any, device: torch.device) -> None:
    layout = lay(TREES, device)
    layout.first = torch.tensor([min(int(p), (7 * t) % 60) for t, p in enumerate(layout.positions)], device=device)
    looked(attention, layout, ONE, splits=2)


def test_a_row_whose_first_position_lies_behind_its_last_gets_zeros(attention: Any, device: torch.device) -> None:
    layout = lay(MIXED[:2], device)
    q, cache = fill(layout, ONE, torch.float32, exact=False)
    layout.first = layout.positions + 40
    for splits in (1, 3):
        found = attention.attend(q, cache, layout, tiles(attention, layout, 7, splits), attention.Look(ONE, 0.25))
        assert (found == 0).all()


def test_rows_with_an_end_of_their_own_see_one_another(attention: Any, device: torch.device) -> None:
    layout = lay(MIXED, device)
    layout.until = torch.tensor([span.reach for span in layout.spans for _ in range(span.num_rows)], device=device)
    looked(attention, layout, ONE, splits=2)
    looked(attention, layout, ONE, window=9)


def test_a_row_that_sees_nothing_gets_zeros_and_others_what_is_below_their_bound(
    attention: Any, device: torch.device
) -> None:
    layout, heads = lay(TREES, device), ONE
    q, cache = fill(layout, heads, torch.float32, exact=False)
    last = layout.positions - 16
    last[-1], last[1] = -300, 52
    look = attention.Look(heads, 0.25)
    layout.first = layout.positions.clone()  # hidden from the rows themselves, not from those who look across
    for splits in (1, 4):
        found = attention.attend(q, cache, layout, tiles(attention, layout, 7, splits), look, last)
        across = replace(layout, positions=last.clamp(min=0), path=None, first=None)
        wanted = torch.where((last >= 0)[:, None], dense(q, cache, across, heads, 0.25), 0.0)
        assert (last < 0).any() and (found[last < 0] == 0).all()
        assert (found - wanted).abs().max() <= 2e-6


def test_what_lies_behind_a_row_or_under_nobodys_pages_reaches_no_result(attention: Any, device: torch.device) -> None:
    layout, heads = lay(TREES, device), ONE
    q, cache = fill(layout, heads, torch.float32, exact=False)
    look = attention.Look(heads, 0.25, window=20)
    clean = attention.attend(q, cache, layout, tiles(attention, layout), look)
    own = torch.zeros(len(cache[0]), dtype=torch.bool, device=device)
    for span in layout.spans:
        slot, lowest = int(layout.slots[span.row]), int(layout.positions[span.row]) - 19
        line = torch.arange(max(0, lowest), span.reach, device=device)
        own[layout.page_table[slot, line // 4] * 4 + line % 4] = True
    for part in cache:
        part[~own] = torch.nan
    assert torch.equal(attention.attend(q, cache, layout, tiles(attention, layout), look), clean)


def test_programs_leave_partial_results_for_their_tiles_rows_alone(
    attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = lay([Rows(37, 40), Rows(100, 3), Rows(130)], device)
    q, cache = fill(layout, ONE, torch.float32, exact=False)
    first, count = torch.tensor([[43, 40], [1, 3]], device=device)
    found, sizes = [], list[int]()
    watch(monkeypatch, attention, lambda given: sizes.append(given["partial"].numel()))
    for splits in (1, 4):
        given = attention.Tiles(first, count, 3, 131, splits)
        found.append(attention.attend(q, cache, layout, [given], attention.Look(ONE, 0.25))[40:])
    assert torch.equal(*found) and not found[0].isnan().any()
    assert sizes[1] == 2 * 3 * ONE.num_heads * attention.chunks_of(131, 48) * ONE.head_dim
    attention.attend(q, cache, layout, [given], attention.Look(ONE, 0.25, window=20))
    assert sizes[2] == 2 * 3 * ONE.num_heads * 2 * ONE.head_dim, "23 positions lie in two chunks of 32, wherever"


def test_padding_rows_look_at_nobodys_page_and_harm_none(attention: Any, device: torch.device) -> None:
    layout, heads = lay(TREES, device), ONE
    q, cache = fill(layout, heads, torch.float32, exact=False)
    look = attention.Look(heads, 0.25)
    wanted = attention.attend(q, cache, layout, tiles(attention, layout), look)
    nobody = len(layout.page_table) - 1
    assert layout.path is not None
    padded = replace(
        layout,
        slots=torch.cat([layout.slots, layout.slots.new_full((3,), nobody)]),
        positions=torch.cat([layout.positions, layout.positions.new_zeros(3)]),
        tree_base=torch.cat([layout.tree_base, layout.tree_base.new_ones(3)]),
        path=torch.cat([layout.path, layout.path.new_full((3, layout.path.shape[1]), -1)]),
    )
    given = tiles(attention, layout)
    given[0].first[-1], given[0].count[-1] = len(layout.slots), 3
    found = attention.attend(torch.cat([q, q[:3]]), cache, padded, given, look)
    assert torch.equal(found[:-3], wanted) and found[-3:].isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_nobody_beside_others_make_no_program_look_further_back(
    attention: Any, device: torch.device, splits: int
) -> None:
    """As drafts that a sequence did not get are."""
    layout, heads = lay([Rows(100, 5)], device), ONE
    q, cache = fill(layout, heads, torch.float32, exact=False)
    look = attention.Look(heads, 0.25, window=20)
    layout.slots[3:], layout.positions[3:], layout.tree_base[3:] = len(layout.page_table) - 1, 0, 1
    given = tiles(attention, layout, 5, splits)
    wanted = attention.attend(q, cache, layout, given, look)[:3]
    line = torch.arange(80, device=device)
    for part in cache:
        part[layout.page_table[0, line // 4] * 4 + line % 4] = torch.nan
    found = attention.attend(q, cache, layout, given, look)
    assert torch.equal(found[:3], wanted) and found.isfinite().all()


def test_a_latent_layers_heads_share_its_keys_whose_last_values_are_the_values(
    attention: Any, device: torch.device
) -> None:
    layout, heads = lay(TREES, device), Heads(3, 1, 56, 40)
    q, (keys, _) = fill(layout, heads, torch.float32, exact=False)
    wanted = dense(q, (keys, keys[..., -40:]), layout, heads, 0.2)
    found = [
        attention.attend(q, (keys,), layout, tiles(attention, layout, 5, splits), attention.Look(heads, 0.2))
        for splits in (1, 3)
    ]
    assert (found[0] - wanted).abs().max() <= 2e-6
    assert torch.equal(*found)


def test_spans_become_tiles_and_long_ones_are_cut(device: torch.device) -> None:
    from paceline.kernels.ops import Span
    from paceline.kernels.triton.attention import tiles_of

    spans = [Span(0, 300, 2000), Span(300, 1, 70), Span(301, 8, 500), Span(309, 0, 0)]
    short, long = tiles_of(spans, device)
    assert (short.first.tolist(), short.count.tolist(), short.rows) == ([300, 301], [1, 8], 8)
    assert (long.first.tolist(), long.count.tolist(), long.rows) == ([256, 128, 0], [44, 128, 128], 128)
    assert short.reach == long.reach == 2000
    assert tiles_of([], device) == []


@pytest.mark.parametrize(
    "tiles, spare, warps, splits",
    [(1, 0, 4, 33), (2, 1, 4, 33), (1, 0, 8, 16), (12, 0, 4, 2), (64, 0, 8, 1), (1, 9, 4, 33), (9000, 0, 4, 1)],
)
def test_chunks_are_shared_by_as_many_programs_as_run_at_once(tiles: int, spare: int, warps: int, splits: int) -> None:
    from paceline.kernels.triton.attention import Tiles, splits_of

    first = torch.zeros(tiles)
    assert splits_of(Tiles(first, first, 1, 32768, spare=spare), 8, warps) == splits
    assert splits_of(Tiles(first, first, 1, 32768, 7), 8, warps) == (1 if tiles == 9000 else 7)


def test_chunks_grow_behind_the_edge() -> None:
    from paceline.kernels.triton.attention import chunks_of

    assert [chunks_of(reach, 1024) for reach in (0, 128, 129, 4096, 4097, 5121, 32768)] == [1, 1, 2, 32, 33, 34, 60]


def test_a_block_is_of_as_many_positions_as_its_bytes_hold() -> None:
    from paceline.kernels.triton import attention

    def block(heads: Heads, size: int = 2) -> int:
        shape = attention._shape(attention.Look(heads, 1.0), heads.value_dim is not None)
        return int(attention._config(attention.Tiles(*[torch.zeros(1)] * 2, 1, 1), shape, False, size)[1])

    widths = [32, 64, 80, 96, 128, 256]
    assert [block(Heads(2, 1, width)) for width in widths] == [128, 128, 64, 64, 64, 32]
    assert [block(Heads(2, 1, width), 4) for width in widths] == [128, 64, 32, 32, 32, 32]
    assert block(Heads(2, 1, 576, 512)) == 32


def test_chunks_may_be_of_one_block_each(attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCKS", (32, 32))
    looked(attention, lay(TREES, device), ALL, splits=3)


def test_a_graphs_tiles_take_other_spans_and_refuse_more_than_they_have_room_for(device: torch.device) -> None:
    from paceline.kernels.ops import Span
    from paceline.kernels.triton.attention import FixedTiles

    fixed = FixedTiles(3, 2, rows=4, reach=1000, device=device)
    fixed.send([Span(0, 6, 60), Span(6, 150, 900)])
    first, count = fixed.short.first, fixed.long.count
    assert (first.tolist(), fixed.short.count.tolist()) == ([0, 4, 0], [4, 2, 0])
    assert (fixed.long.first.tolist(), count.tolist(), fixed.long.reach) == ([134, 6], [22, 128], 1000)
    fixed.send([Span(2, 1, 10)])  # the same tensors, which a graph reads
    assert first.tolist() == [2, 0, 0] and count.tolist() == [0, 0]
    with pytest.raises(ValueError, match="1 spans need 4 tiles of 4 rows; there are 3"):
        fixed.send([Span(0, 13, 20)])


def test_queries_of_another_width_are_refused_in_one_sentence(attention: Any, device: torch.device) -> None:
    layout = lay(MIXED, device)
    q, cache = fill(layout, Heads(4, 2, 16), torch.float32, exact=False)
    with pytest.raises(ValueError, match="rows of 4 · 32 values, not \\(13, 64\\)"):
        attention.attend(q, cache, layout, [], attention.Look(Heads(4, 2, 32), 1.0))
    with pytest.raises(ValueError, match="above 0, not 0"):
        attention.attend(q, cache, layout, [], attention.Look(Heads(4, 2, 16), 0))


@pytest.mark.parametrize("heads", [Heads(4, 1, 256), Heads(8, 4, 256), Heads(32, 8, 128), Heads(9, 3, 64)], ids=str)
def test_chunks_are_copied_ahead_where_they_are_merged_only_as_far_as_there_is_room(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import attention

    given = list[dict[str, Any]]()
    monkeypatch.setattr(attention.looking, "look", Launched(given))
    monkeypatch.setattr(attention, "_arrivals", lambda device: torch.empty(0, device=device))
    layout = lay([Rows(0)], torch.device("cpu"))
    for tiles_, rows in ((5, 128), (3, 128), (40, 16), (1, 1), (1, 32)):
        first = torch.zeros(tiles_, dtype=torch.int64, device="meta")
        q = torch.empty(tiles_ * rows, heads.num_heads * heads.head_dim, device="meta", dtype=torch.bfloat16)
        part = torch.empty(16, heads.num_kv_heads, heads.head_dim, device="meta", dtype=torch.bfloat16)
        some = attention.Tiles(first, first, rows, 32768, long=rows == 128)
        attention.attend(q, (part, part), layout, [some], attention.Look(heads, 0.1))
        one = given[-1]
        ahead = (one["DEEP"] - 1) * one["AHEAD"] * one["FEW"] * (one["WIDE_PAD"] + 2) * 4
        assert ahead <= attention.ROOM
    found = {(one["SPLIT"], one["DEEP"]) for one in given}
    assert found == {(False, 1), (True, 3), (True, 1)} if heads.head_dim == 256 else found <= {(False, 1), (True, 3)}


class Launched:
    """In place of a kernel: what each launch was given."""

    def __init__(self, given: list[dict[str, Any]]) -> None:
        self.given = given

    def __getitem__(self, grid: Any) -> Any:
        return lambda **given: self.given.append(given)


def test_every_block_is_one_programs_whether_far_chunks_have_programs_of_their_own_or_not() -> None:
    """The device code of chunks.py on plain numbers."""
    from paceline.kernels.triton import chunks

    apart = 0
    for per, near, far in ((1, 4, 3), (2, 2, 4), (2, 8, 16), (4, 4, 8)):
        edge = per * near
        sizes = {"PER": per, "EDGE": edge, "FAR": far}
        below, first, share = (plain(one, sizes) for one in (chunks.chunks_below, chunks.first_block, chunks.one_kind))
        for end in (edge, edge + 1, edge + far, edge + 2 * far + 1, edge + 5 * far):
            for low in (low for low in (0, 1, edge - 1, edge) if low < end):
                lowest, end_chunk = below(low + 1) - 1, below(end)
                count = end_chunk - lowest
                for splits in (1, 2, 3, 5, 9):
                    busy, seen = min(splits, max(count, 1)), list[int]()
                    for split in range(busy):
                        chunk0, sharing, stop = share(lowest + split, busy, end, split, lowest, count, busy)
                        mine = [*range(chunk0, below(stop), sharing)]
                        kinds = {one < near for one in mine}
                        apart += sharing != busy
                        assert mine and (sharing == busy or len(kinds) == 1), "those apart have chunks of one kind"
                        seen += [block for one in mine for block in range(first(one), min(first(one + 1), stop))]
                    assert sorted(block for block in seen if block >= low) == [*range(low, end)]
    assert apart > 20


def plain(function: Any, sizes: dict[str, int]) -> Any:
    """A kernel's helper as Python runs it."""
    names = {"tl": Numbers, **{name: getattr(builtins, name) for name in ("min", "max")}}
    body = types.FunctionType(function.fn.__code__, {**function.fn.__globals__, **names})
    return lambda *given: body(*given, *sizes.values())


class Numbers:
    """What chunks.py asks of triton.language, of numbers."""

    constexpr = int
    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def where(which: bool, one: int, other: int) -> int:
        return one if which else other
