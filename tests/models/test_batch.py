"""Batches: ragged and static packing row by row against each other and against plain counting."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.slots import Slots
from paceline.drafters import tree
from paceline.models.batch import Batch, Nodes, Places, Static, Work, pack, pack_rows, places_of
from tests.models.frames import pack_in_frame

CPU = torch.device("cpu")
MAX_LENGTH, NUM_SLOTS = 40, 6


@dataclass
class Draft:
    """One sequence's tree, as lists."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]


@dataclass
class Case:
    """A round made up: texts, pages, who computes what, and what was drafted for whom."""

    texts: list[list[int]]  # by slot
    pages: list[list[int]]
    block_size: int
    work: list[Work]  # sampling sequences first; num_nodes as large as its tree
    num_sampling: int
    drafts: list[Draft]  # of the sampling sequences
    chain: bool
    width: int  # nodes a proposal has room for

    def table(self, apart: bool) -> Slots:
        table = Slots(NUM_SLOTS, MAX_LENGTH, len(self.pages[0]), CPU, apart=apart)
        for slot, (text, pages) in enumerate(zip(self.texts, self.pages)):
            table.begin(slot, text, 1)
            table.pages.write(slot, 0, pages)
        table.flush()
        return table

    def nodes(self) -> Nodes:
        """What stands behind a tree's end is nonsense, as it is in a proposal that was cut."""
        tokens = torch.full((self.num_sampling, self.width), 77)
        parents = torch.full((self.num_sampling, self.width), tree.PADDING)
        for row, draft in enumerate(self.drafts):
            tokens[row, : len(draft.tokens)] = torch.tensor(draft.tokens, dtype=torch.int64)
            parents[row, : len(draft.tokens)] = torch.tensor(draft.parents, dtype=torch.int64)
        sizes = torch.tensor([len(draft.tokens) for draft in self.drafts], dtype=torch.int64)
        return Nodes(tokens, sizes, None if self.chain else tree.paths(parents))

    def padded(self) -> list[Work]:
        """With room for as many nodes as a proposal may have."""
        return [
            item._replace(num_nodes=self.width if number < self.num_sampling else 0)
            for number, item in enumerate(self.work)
        ]


def make_case(chooser: random.Random, chain: bool) -> Case:
    block_size = chooser.choice([1, 4, 16])
    texts = [[chooser.randrange(97) for _ in range(chooser.randint(1, MAX_LENGTH - 8))] for _ in range(NUM_SLOTS)]
    each = MAX_LENGTH // block_size + 1
    numbers = chooser.sample(range(1, NUM_SLOTS * each + 1), NUM_SLOTS * each)
    pages = [numbers[slot * each : (slot + 1) * each] for slot in range(NUM_SLOTS)]
    slots = chooser.sample(range(NUM_SLOTS), chooser.randint(1, NUM_SLOTS))
    num_sampling = chooser.randint(0, len(slots))
    width = chooser.randint(0, 6) if num_sampling else 0  # a proposal for nobody has no nodes
    work, drafts = [], []
    for number, slot in enumerate(slots):
        length = len(texts[slot])
        if number >= num_sampling:  # a prompt chunk
            start = chooser.randrange(length)
            work.append(Work(slot, start, chooser.randint(1, length - start)))
            continue
        start = length - 1 if chooser.random() < 0.6 else chooser.randrange(length)
        size = chooser.randint(0, width)
        parents = [node - 1 if chain else chooser.randint(-1, node - 1) for node in range(size)]
        drafts.append(Draft([chooser.randrange(97) for _ in range(size)], parents))
        work.append(Work(slot, start, length - start, size))
    return Case(texts, pages, block_size, work, num_sampling, drafts, chain, width)


@dataclass
class Row:
    """What a row of a batch is, by plain counting."""

    slot: int
    token: int
    position: int
    line: int
    ancestors: list[int]  # nodes by depth, itself last; none for a committed token
    base: int  # where its sequence's nodes begin on the line


def rows_of(case: Case) -> list[list[Row]]:
    """The rows of each sequence that are there."""
    result = []
    for number, item in enumerate(case.work):
        assert item.start is not None
        base, text = item.start + item.count, case.texts[item.slot]
        rows = [Row(item.slot, text[line], line, line, [], base) for line in range(item.start, base)]
        draft = case.drafts[number] if number < case.num_sampling else Draft()
        for node, token in enumerate(draft.tokens):
            path = draft.path(node)
            rows.append(Row(item.slot, token, base - 1 + len(path), base + node, path, base))
        result.append(rows)
    return result


def keys_of(case: Case, row: Row, first: int = 0) -> list[int]:
    """The cache rows it may see, in the order of their positions."""
    committed = range(first, min(row.base, row.position + 1))
    lines = [*committed, *(row.base + node for node in row.ancestors)]
    return [place(case, row.slot, line) for line in lines]


def place(case: Case, slot: int, line: int) -> int:
    return case.pages[slot][line // case.block_size] * case.block_size + line % case.block_size


def visible(batch: Batch, number: int) -> list[int]:
    """The same as a kernel reads it out of the layout."""
    layout = batch.layout
    slot, position, base = (int(part[number]) for part in (layout.slots, layout.positions, layout.tree_base))
    lines = []
    for at in range(0 if layout.first is None else int(layout.first[number]), position + 1):
        lines.append(at if at < base or layout.path is None else base + int(layout.path[number, at - base]))
    pages, size = layout.page_table[slot].tolist(), layout.block_size
    return [pages[line // size] * size + line % size for line in lines]


def check_row(case: Case, batch: Batch, number: int, row: Row, first: int = 0) -> None:
    layout = batch.layout
    assert int(batch.ids[number]) == row.token and int(layout.slots[number]) == row.slot
    assert int(layout.positions[number]) == row.position and int(layout.lines[number]) == row.line
    assert int(layout.write[number]) == place(case, row.slot, row.line)
    if layout.path is not None:
        assert [node for node in layout.path[number].tolist() if node >= 0] == row.ancestors
    assert visible(batch, number) == keys_of(case, row, first)


def check_padding(batch: Batch, number: int, null: int) -> None:
    """A row that is not there belongs to nobody, writes to the page of nobody and sees nobody's keys."""
    layout = batch.layout
    assert int(layout.slots[number]) == null
    assert 0 <= int(layout.write[number]) < layout.block_size, "page 0"
    assert all(0 <= key < layout.block_size for key in visible(batch, number))
    assert 0 <= int(batch.ids[number]) < 97


def check_spans(batch: Batch, sizes: list[int]) -> None:
    spans = batch.layout.spans
    assert [span.num_rows for span in spans] == sizes
    assert [span.row for span in spans] == [sum(sizes[:number]) for number in range(len(sizes))]
    for span in spans:
        lines = batch.layout.lines[span.row : span.row + span.num_rows].tolist()
        assert max(lines, default=0) < span.reach


@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(40))
def test_ragged_rows_are_what_plain_counting_says(seed: int, chain: bool) -> None:
    case = make_case(random.Random(seed), chain)
    batch = pack(case.work, case.table(apart=False), case.block_size, case.nodes(), case.num_sampling)
    expected = rows_of(case)
    assert len(batch.ids) == sum(map(len, expected)), "no row is wasted"
    for number, row in enumerate(row for rows in expected for row in rows):
        check_row(case, batch, number, row)
    assert batch.slots.tolist() == [item.slot for item in case.work]
    check_spans(batch, [len(rows) for rows in expected])
    ends = [(item.start or 0) + item.count + item.num_nodes for item in case.work]
    assert [span.reach for span in batch.layout.spans] == ends


@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(40))
def test_static_rows_are_the_ragged_ones_with_padding_between_them(seed: int, chain: bool) -> None:
    """In a frame: once with starts that the host knows, once with some that only the device knows."""
    case = make_case(random.Random(seed), chain)
    ragged = pack(case.work, case.table(apart=False), case.block_size, case.nodes(), case.num_sampling)
    table = case.table(apart=True)
    known = pack_in_frame(case.padded(), table, case.block_size, case.nodes(), case.num_sampling)
    newest = [
        item._replace(start=None) if item.start == len(case.texts[item.slot]) - 1 and item.count == 1 else item
        for item in case.padded()
    ]
    for batch in (known, pack_in_frame(newest, table, case.block_size, case.nodes(), case.num_sampling)):
        taken = 0
        row = 0
        for wide, rows in zip(case.padded(), rows_of(case)):
            for offset in range(wide.count + wide.num_nodes):
                if offset < len(rows):
                    check_row(case, batch, row, rows[offset])
                    for part in ("slots", "positions", "tree_base", "lines", "write"):
                        assert getattr(batch.layout, part)[row] == getattr(ragged.layout, part)[taken]
                    assert batch.ids[row] == ragged.ids[taken] and visible(batch, row) == visible(ragged, taken)
                    taken += 1
                else:
                    check_padding(batch, row, table.null)
                row += 1
        assert taken == len(ragged.ids) and row == len(batch.ids)
        check_spans(batch, [item.count + item.num_nodes for item in case.padded()])
        assert batch.slots.tolist() == [*ragged.slots.tolist(), table.null]


@pytest.mark.parametrize("seed", range(40))
def test_rows_at_or_beyond_their_end_are_padding_and_the_others_see_from_their_first_position_on(seed: int) -> None:
    chooser = random.Random(seed)
    case = make_case(chooser, chain=True)
    table, work = case.table(apart=True), case.padded()
    places = places_of(tuple((item.count, item.num_nodes) for item in work), case.num_sampling, case.width, CPU)
    slots, starts = (torch.tensor(part) for part in zip(*((item.slot, item.start) for item in work)))
    ends = [chooser.randint((item.start or 0) - 1, (item.start or 0) + item.count + 7) for item in work]
    firsts = [chooser.randint(0, item.start or 0) for item in work]
    reaches = [(item.start or 0) + item.count + item.num_nodes for item in work]
    given = Static(reaches, case.nodes(), torch.tensor(ends), torch.tensor(firsts))
    batch = pack_rows(places, slots, starts, table, case.block_size, given)
    number = 0
    for item, rows, end, first in zip(work, rows_of(case), ends, firsts):
        for offset in range(item.count + item.num_nodes):
            if offset < len(rows) and rows[offset].line < end:
                check_row(case, batch, number, rows[offset], first)
            else:
                check_padding(batch, number, table.null)
            number += 1


def test_work_that_feeds_drafts_alone_has_no_committed_row() -> None:
    """What a draft model does after its first draft: a node each, at whatever place, under ragged and static alike."""
    case = make_case(random.Random(0), chain=True)
    tokens = torch.tensor([[5], [6]])
    work = [Work(2, len(case.texts[2]) + 1, 0, 1), Work(4, len(case.texts[4]), 0, 1)]
    nodes = Nodes(tokens, torch.ones(2, dtype=torch.int64), None)
    for apart in (False, True):
        batch = pack(work, case.table(apart), case.block_size, nodes)
        assert batch.ids.tolist() == [5, 6] and batch.places.node.tolist() == [0, 0]
        for number, item in enumerate(work):
            line = item.start or 0
            assert int(batch.layout.lines[number]) == int(batch.layout.positions[number]) == line
            assert int(batch.layout.write[number]) == place(case, item.slot, line)
            assert visible(batch, number) == [place(case, item.slot, at) for at in range(line + 1)]


def test_without_nodes_there_is_no_path_and_no_padding() -> None:
    case = make_case(random.Random(3), chain=False)
    work = [item._replace(num_nodes=0) for item in case.work]
    batches = [pack(work, case.table(apart), case.block_size, None, case.num_sampling) for apart in (False, True)]
    for part in ("slots", "positions", "tree_base", "lines", "write"):
        assert torch.equal(*(getattr(batch.layout, part) for batch in batches))
    assert torch.equal(batches[0].ids, batches[1].ids)
    assert all(batch.layout.path is None and batch.layout.first is None for batch in batches)


# Places

shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=6)


@given(shapes, st.data())
@settings(max_examples=150, deadline=None)
def test_places_answers_what_counting_answers(shape: list[tuple[int, int]], data: st.DataObject) -> None:
    num_sampling = data.draw(st.integers(0, len(shape)))
    most = max((nodes for _, nodes in shape[:num_sampling]), default=0)
    width = data.draw(st.integers(most, most + 2))
    places = Places(tuple(shape), num_sampling, width, CPU)
    rows: list[tuple[int, int, int]] = []  # owner, offset, node
    firsts, sampled, firsts_sampled = [], [], [0]
    for owner, (count, nodes) in enumerate(shape):
        firsts.append(len(rows))
        for offset in range(count + nodes):
            if owner < num_sampling and offset >= count - 1:
                sampled.append(len(rows))
            rows.append((owner, offset, offset - count))
        if owner < num_sampling:
            firsts_sampled.append(len(sampled))
    assert places.num_rows == len(rows)
    for name, column in (("owner", 0), ("offset", 1), ("node", 2)):
        assert getattr(places, name).tolist() == [row[column] for row in rows]
    assert places.counts.tolist() == [count for count, _ in shape] and places.first_rows == firsts
    assert places.sampled.tolist() == sampled and places.first_sampled == firsts_sampled
    assert places.sampled_counts == [1 + nodes for _, nodes in shape[:num_sampling]]
    assert places.sampled_owner.tolist() == [rows[row][0] for row in sampled]
    assert places.sampled_node.tolist() == [rows[row][2] for row in sampled]
    check_index(places, shape[:num_sampling], width)
    check_grid(places.grid, shape)


def check_index(places: Places, shape: list[tuple[int, int]], width: int) -> None:
    """The root's row, then each node's; beyond a tree's end its last row again, which is always a row of its own."""
    assert places.index.shape == (len(shape), 1 + width)
    for number, (_, nodes) in enumerate(shape):
        own = range(places.first_sampled[number], places.first_sampled[number + 1])
        assert places.index[number].tolist() == [own[min(node, nodes)] for node in range(1 + width)]


def check_grid(grid: Any, shape: list[tuple[int, int]]) -> None:
    sizes = {count + nodes for count, nodes in shape}
    if len(sizes) != 1:
        assert grid is None
    else:
        size = sizes.pop()
        assert grid.tolist() == [list(range(n * size, (n + 1) * size)) for n in range(len(shape))]


def test_places_are_made_once_a_shape() -> None:
    shape = ((1, 3), (1, 3))
    assert places_of(shape, 2, 3, CPU) is places_of(shape, 2, 3, CPU)
    assert places_of(shape, 2, 3, CPU).owner is places_of(shape, 2, 3, CPU).owner
    assert places_of(shape, 1, 3, CPU) is not places_of(shape, 2, 3, CPU)
