"""Paged attention of trees in Triton: a node's bits are those of the same row in a chain.

Blocks and chunks are small here, as in `test_attention.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.ops import Heads, LayerCache, Layout
from tests.kernels.triton.layouts import BRANCHES, ONE, Rows, dense, fill, lay, only, tiles, watch

pytest.importorskip("triton")


class Same:
    """A cache where sequence 0 is a tree and sequence 1 the chain of its deepest branch."""

    deepest = (0, 2, 4, 5)  # the nodes of BRANCHES' longest branch

    def __init__(
        self, module: Any, device: torch.device, dtype: torch.dtype, heads: Heads = ONE, start: int | None = None
    ) -> None:
        self.module, self.heads = module, heads
        # In float32 the order of merging shows, hence more chunks; rounded to 16 bits it would not.
        start = start or (110 if dtype == torch.float32 else 46)
        exact = device.type == "cpu"
        self.tree = lay([Rows(start, parents=BRANCHES), Rows(0)], device)
        self.q, self.cache = fill(self.tree, self.heads, dtype, exact)
        self.chain = lay([Rows(0), Rows(start - 2, 2 + len(self.deepest))], device)  # under the same pages
        self.chain.page_table = self.tree.page_table
        for part in self.cache:
            line = torch.arange(start, device=device)
            part[self.at(1, line)] = part[self.at(0, line)]
            for depth, node in enumerate(self.deepest):
                part[self.at(1, torch.tensor([start + depth]))] = part[self.at(0, torch.tensor([start + node]))]
        self.chain_q = self.q[:1].repeat(len(self.chain.slots), 1)
        for depth, node in enumerate(self.deepest):
            self.chain_q[1 + 2 + depth] = self.q[1 + node]

    def at(self, slot: int, line: Tensor) -> Tensor:
        pages: Tensor = self.tree.page_table[slot, line // 4]
        return pages * 4 + line.to(pages.device) % 4

    def attend(self, q: Tensor, layout: Layout, rows: int, splits: int, **look: Any) -> Tensor:
        cache: LayerCache = self.cache
        given = tiles(self.module, layout, rows, splits)
        found: Tensor = self.module.attend(q, cache, layout, given, self.module.Look(self.heads, 0.3, **look))
        return found


@pytest.mark.parametrize(
    "dtype, look", [(torch.bfloat16, {}), (torch.float32, {"window": 41, "softcap": 2.0})], ids=str
)
def test_a_rows_bits_are_the_same_alone_in_a_chunk_and_as_a_node(
    attention: Any, device: torch.device, dtype: torch.dtype, look: dict[str, Any]
) -> None:
    same = Same(attention, device, dtype)
    chunk = same.attend(same.chain_q, same.chain, 16, 1, **look)
    tree = same.attend(same.q, same.tree, 16, 1, **look)
    for depth, node in enumerate(same.deepest):
        row = 1 + 2 + depth
        assert torch.equal(tree[1 + node], chunk[row])
        alone = same.attend(same.chain_q[row : row + 1], only(same.chain, row), 1, 1, **look)
        assert torch.equal(alone[0], chunk[row])
        alone = same.attend(same.q[1 + node : 2 + node], only(same.tree, 1 + node), 1, 3, **look)
        assert torch.equal(alone[0], chunk[row])


def test_a_block_may_be_everyones_up_to_where_rows_have_keys_of_their_own(
    attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As blocks of real models are: wider than a tree."""
    for name, value in (("BLOCKS", (128, 128)), ("CHUNK", 128), ("EDGE", 128), ("FAR_CHUNK", 128)):
        monkeypatch.setattr(attention, name, value)
    same = Same(attention, device, torch.bfloat16)
    chunk = same.attend(same.chain_q, same.chain, 16, 1)
    for rows, long in ((16, False), (3, False), (16, True)):
        given = [replace(some, long=long) for some in tiles(attention, same.tree, rows)]
        tree = attention.attend(same.q, same.cache, same.tree, given, attention.Look(same.heads, 0.3))
        assert all(torch.equal(tree[1 + node], chunk[3 + depth]) for depth, node in enumerate(same.deepest))


@pytest.mark.parametrize("splits", [1, 2])
def test_heads_that_fill_more_than_a_program_look_at_their_rows_own_keys(
    attention: Any, device: torch.device, splits: int
) -> None:
    same = Same(attention, device, torch.bfloat16, Heads(20, 1, 16))
    chunk = same.attend(same.chain_q, same.chain, 16, 1)
    tree = same.attend(same.q, same.tree, 16, splits)
    assert all(torch.equal(tree[1 + node], chunk[3 + depth]) for depth, node in enumerate(same.deepest))


def test_more_tiles_than_can_be_counted_look_at_their_rows_own_keys_too(
    attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, own = Same(attention, device, torch.bfloat16), list[int]()
    watch(monkeypatch, attention, lambda given: own.append(given["OWN"]))
    wanted = same.attend(same.q, same.tree, 16, 1)
    monkeypatch.setattr(attention, "MOST_SHARED", 1)
    assert torch.equal(same.attend(same.q, same.tree, 16, 1), wanted)
    assert own[0] > 0 and own[1] == 0, "nobody counts beyond the end"


def test_more_programs_than_run_at_once_take_fewer_registers_and_change_no_bit(
    attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = Same(attention, device, torch.bfloat16)
    wanted = same.attend(same.q, same.tree, 16, 1)
    registers = list[Any]()
    watch(monkeypatch, attention, lambda given: registers.append(given.get("maxnreg")))
    monkeypatch.setattr(attention, "WARPS", 8)
    assert torch.equal(same.attend(same.q, same.tree, 16, 1), wanted)
    assert registers == [attention.CROWDED["maxnreg"]]


@pytest.fixture
def abreast(attention: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with blocks in which rows' own keys stand side by side, and what each launch of it was given."""
    for name, value in (("BLOCKS", (64, 64)), ("CHUNK", 64), ("EDGE", 64), ("FAR_CHUNK", 128)):
        monkeypatch.setattr(attention, name, value)
    given = list[dict[str, Any]]()
    watch(monkeypatch, attention, given.append)
    attention.given = given
    yield attention
    del attention.given


def spread(module: Any, monkeypatch: pytest.MonkeyPatch, look: Any) -> Tensor:
    """The same by programs of one row each."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "ROOM_OWN", 0)
        found: Tensor = look()
    assert module.given[-1]["OWN"] and not module.given[-1]["ABREAST"]
    return found


# Where nodes begin, splits, chunks that are few, and whether programs have as many rows as they can.
PLACES = (
    (33, 1, 0, True), (48, 2, 99, False), (63, 1, 0, False), (64, 3, 0, True), (79, 1, 0, True), (126, 2, 0, False),
    (126, 2, 99, True),
)  # fmt: skip


@pytest.mark.parametrize("heads", [ONE, Heads(3, 1, 16), Heads(12, 2, 16), Heads(20, 1, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_look_at_their_own_keys_abreast_and_no_bit_changes(
    abreast: Any, device: torch.device, dtype: torch.dtype, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a block the nodes begin, and where they go on in the next one, in the same chunk and another."""
    for start, splits, single, crowd in PLACES:
        monkeypatch.setattr(abreast, "SINGLE_OWN", single)
        monkeypatch.setattr(abreast, "ALIKE", 1 if crowd else 1 << 20)
        same = Same(abreast, device, dtype, heads, start)
        look = {"window": 41, "softcap": 2.0} if start in (64, 126) else {}
        chunk = same.attend(same.chain_q, same.chain, 16, 1, **look)
        tree = same.attend(same.q, same.tree, 16, splits, **look)
        most = max(1, 16 // (heads.num_heads // heads.num_kv_heads))
        assert abreast.given[-1]["ABREAST"] == (1 << (most.bit_length() - 1) if crowd else 1)
        alone = spread(abreast, monkeypatch, lambda: same.attend(same.q, same.tree, 16, 1, **look))  # noqa: B023
        assert torch.equal(tree, alone), start
        assert all(torch.equal(tree[1 + node], chunk[3 + depth]) for depth, node in enumerate(same.deepest)), start
        wanted = dense(same.q, same.cache, same.tree, heads, 0.3, **look)
        assert (tree.double() - wanted).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 2e-6)
    assert not abreast._arrivals(device).any()


def test_keys_of_deep_trees_do_not_stand_side_by_side(abreast: Any, device: torch.device) -> None:
    deep, wide = tuple(range(-1, 17)), Heads(1, 1, 128)
    for parents, heads, rows in ((deep, ONE, 0), (deep[:-1], ONE, 2), (BRANCHES, wide, 2)):
        layout = lay([Rows(40, parents=parents), Rows(9, parents=BRANCHES)], device)
        q, cache = fill(layout, heads, torch.bfloat16, exact=False)
        found = abreast.attend(q, cache, layout, tiles(abreast, layout, 20), abreast.Look(heads, 0.3))
        assert abreast.given[-1]["ABREAST"] == rows and bool(abreast.given[-1]["OWN"]) != bool(rows)
        assert (found.double() - dense(q, cache, layout, heads, 0.3)).abs().max() <= 2e-2


def test_what_a_node_holds_reaches_only_those_who_see_it(attention: Any, device: torch.device) -> None:
    same = Same(attention, device, torch.bfloat16)
    wanted = same.attend(same.q, same.tree, 16, 2)
    line = torch.tensor([46 + 1])  # of node 1
    same.cache[1][same.at(0, line)] = torch.nan
    assert same.tree.path is not None
    sees = (same.tree.path == 1).any(1)
    found = same.attend(same.q, same.tree, 16, 2)
    assert sees.any() and torch.equal(found[~sees], wanted[~sees]) and found[sees].isnan().any(1).all()


def test_a_trees_programs_leave_no_more_than_nodes_can_reach(
    attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHUNK", "EDGE", "FAR_CHUNK"):
        monkeypatch.setattr(attention, name, 16)
    same = Same(attention, device, torch.float32)
    sizes = list[int]()
    watch(monkeypatch, attention, lambda given: sizes.append(given["chunks"]))
    found = [same.attend(same.q, same.tree, 16, splits) for splits in (1, 2)]
    assert torch.equal(*found) and sizes == [3, 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_neither_tiles_nor_splits_change_a_bit(
    attention: Any, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor whether few chunks are one program's, though they may be shared."""
    same = Same(attention, device, dtype)
    for q, layout in ((same.q, same.tree), (same.chain_q, same.chain)):
        wanted = same.attend(q, layout, 2, 1)
        for rows, splits, single in ((3, 5, 0), (16, 2, 0), (40, 1, 0), (16, 2, 16 * 3), (5, 3, 1 << 20)):
            monkeypatch.setattr(attention, "SINGLE", single)
            assert torch.equal(same.attend(q, layout, rows, splits), wanted)


def test_programs_with_several_chunks_have_far_ones_or_near_ones_and_no_bit_changes(
    abreast: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four near chunks of 16 positions and two or three far ones of 48, shared by too few programs for one each."""
    for name, value in (("BLOCKS", (16, 16)), ("CHUNK", 16), ("EDGE", 64), ("FAR_CHUNK", 48)):
        monkeypatch.setattr(abreast, name, value)
    for start, dtype in ((126, torch.bfloat16), (110, torch.float32)):
        same = Same(abreast, device, dtype, ONE, start)
        for q, layout in ((same.q, same.tree), (same.chain_q, same.chain)):
            wanted = same.attend(q, layout, 16, 1)
            exactly = dense(q, same.cache, layout, ONE, 0.3)
            assert (wanted.double() - exactly).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 2e-6)
            for splits in (2, 3, 4, 5):  # too few for the near ones, just enough, more, a chunk each
                assert torch.equal(same.attend(q, layout, 16, splits), wanted), (start, splits)
    layout = lay([Rows(140), Rows(100), Rows(30)], device)  # and where the first positions are not seen
    layout.first = torch.tensor([40, 70, 0], device=device)
    q, cache = fill(layout, ONE, torch.bfloat16, exact=False)
    found = [abreast.attend(q, cache, layout, tiles(abreast, layout, 1, n), abreast.Look(ONE, 0.3)) for n in (1, 2, 3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0].double() - dense(q, cache, layout, ONE, 0.3)).abs().max() <= 2e-2
    assert not abreast._arrivals(device).any()


def test_a_cache_of_any_size_is_read_the_same(
    attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = Same(attention, device, torch.bfloat16)
    wanted = same.attend(same.q, same.tree, 16, 2)
    monkeypatch.setattr(attention, "SMALL", 0)  # larger than 32 bits reach
    assert torch.equal(same.attend(same.q, same.tree, 16, 2), wanted)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [Heads(3, 1, 16), Heads(17, 1, 16)], ids=str)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_nodes_that_a_sequence_did_not_get_keep_no_program_waiting(
    attention: Any, device: torch.device, heads: Heads, splits: int, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place that is merged was written, and every tile's programs are counted to the end."""
    if side_by_side:
        for name, value in (("BLOCKS", (32, 32)), ("CHUNK", 32), ("FAR_CHUNK", 64)):
            monkeypatch.setattr(attention, name, value)
    watch(
        monkeypatch, attention, lambda given: [given[name].fill_(torch.nan) for name in ("partial", "stats", "out_at")]
    )
    for window in (None, 20):
        layout = lay([Rows(3, parents=BRANCHES), Rows(70, parents=BRANCHES), Rows(100, parents=(-1,))], device)
        q, cache = fill(layout, heads, torch.float32, exact=False)
        wanted = dense(q, cache, layout, heads, 0.25, window=window)
        gone = torch.tensor([4, 6, 8, 9, 10, 11, 12, 13], device=device)  # of the second tree all but its root
        assert layout.path is not None
        layout.slots[gone], layout.positions[gone], layout.tree_base[gone] = len(layout.page_table) - 1, 0, 1
        layout.path[gone] = -1
        look = attention.Look(heads, 0.25, window=window)
        found = attention.attend(q, cache, layout, tiles(attention, layout, 9, splits), look)
        real = layout.tree_base > 1
        assert (found.double() - wanted)[real].abs().max() <= 2e-6 and found.isfinite().all()
        assert not attention._arrivals(device).any()


def test_programs_have_as_few_rows_as_leave_few_of_them_or_as_many_as_fit(attention: Any, device: torch.device) -> None:
    wide = (128, 8, 4), (128, 16, 4), (256, 2, 2), (256, 8, 2)
    for head_dim, kv_heads, wanted in ((64, 1, 1), (64, 2, 2), (64, 4, 4), *wide):
        shape = attention._shape(attention.Look(Heads(2 * kv_heads, kv_heads, head_dim), 0.3), False)
        one = attention.Tiles(torch.zeros(1), torch.zeros(1), 32, 512, None)
        assert attention._abreast(one, 16, 32, 4, shape, 2) == wanted, (head_dim, kv_heads)


def test_keys_of_ones_own_begin_where_a_tensor_cores_sum_ends(attention: Any, device: torch.device) -> None:
    from tests.kernels.triton.edges import edges

    found = torch.empty(64, dtype=torch.int64, device=device)
    edges[(1,)](found, 3, BLOCK=64, FEW_OWN=32)
    sixteens = torch.arange(64) // attention.looking.ADDED.value * attention.looking.ADDED.value
    assert found.tolist() == (192 + sixteens.clamp(max=32)).tolist()
