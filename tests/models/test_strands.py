"""Batches cut into strands: which rows go together, and that trees and padding change nothing."""

from __future__ import annotations

import pytest
import torch

from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.models import loader, strands
from paceline.models.batch import Batch, Nodes, Work, pack
from paceline.models.strands import cut, gather, group
from tests.models.fallback_families import SHOWN, make
from tests.models.frames import pack_in_frame
from tests.models.running import CPU

TEXTS = ([(7 * i + 3) % 90 + 3 for i in range(20)], [(11 * i + 5) % 90 + 3 for i in range(9)])
PATHS = [[0], [1], [0, 2], [1, 3], [0, 4], [0, 4, 5]]  # two children of the newest token, a fork under the first
TOKENS = [[30, 31, 32, 33, 34, 35], [40, 41, 42, 43, 44, 45]]


def tables() -> Slots:
    table = Slots(3, 64, 8, CPU)
    for slot, (text, pages) in enumerate(zip(TEXTS, ([5, 2, 9, 11], [7, 3, 1, 4]))):
        table.begin(slot, text, len(text))
        table.pages.write(slot, 0, pages)
    return table


def nodes() -> Nodes:
    paths = torch.tensor([[*path, *[-1] * (3 - len(path))] for path in PATHS])
    return Nodes(torch.tensor(TOKENS), torch.tensor([6, 6]), torch.stack([paths, paths]))


def tree_batch(table: Slots) -> Batch:
    return pack([Work(0, 19, 1, 6), Work(1, 8, 1, 6)], table, 8, nodes())


def test_a_branch_begins_a_strand_behind_the_one_it_leaves() -> None:
    found = cut(tree_batch(tables()).layout)
    assert [(one.rows, one.past, one.stage) for one in found] == [
        ([0, 1, 3], 19, 0),
        ([2, 4], 20, 1),
        ([5, 6], 21, 1),
        ([7, 8, 10], 8, 0),
        ([9, 11], 9, 1),
        ([12, 13], 10, 1),
    ]


def test_alone_every_row_is_a_strand_behind_its_parent() -> None:
    found = cut(tree_batch(tables()).layout, alone=True)
    assert [one.rows for one in found] == [[row] for row in range(14)]
    assert [one.past for one in found[:7]] == [19, 20, 20, 21, 21, 21, 22]
    assert [one.stage for one in found[:7]] == [0, 1, 1, 2, 2, 2, 3]


def test_strands_of_equally_many_rows_go_together_stage_after_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cut(tree_batch(tables()).layout)
    assert [[one.rows[0] for one in members] for members in group(found)] == [[7, 0], [9, 12, 2, 5]]
    assert [len(members) for members in group(found, alike=True)] == [1, 1, 1, 1, 1, 1]
    monkeypatch.setattr(strands, "MOST_KEYS", 50)
    assert [[one.rows[0] for one in members] for members in group(found)] == [[7, 0], [2, 5], [9, 12]]


def test_the_past_is_gathered_by_position_and_padded_on_the_left() -> None:
    layout = tree_batch(tables()).layout
    short, long = (next(one for one in cut(layout) if one.rows[0] == row) for row in (12, 5))
    look = gather(layout, [short, long])
    own = [7 * 8 + line for line in range(8)] + [3 * 8, 3 * 8 + 1]  # 8 lines, the newest token's, node 0's
    assert look.seen is not None and look.seen[0].tolist() == [False] * 11 + [True] * 12
    assert look.keys[0].tolist() == [0] * 11 + own + look.write[0].tolist()
    assert look.keys[1, :21].tolist() == [page * 8 + line for page in (5, 2) for line in range(8)] + [
        72,
        73,
        74,
        75,
        76,
    ]


def test_rows_of_nobody_are_in_no_strand() -> None:
    table = Slots(3, 64, 8, CPU, apart=True)
    for slot, text in enumerate(TEXTS):
        table.begin(slot, text, len(text))
        table.pages.write(slot, 0, [5, 2, 9, 11])
    table.flush()
    fewer = nodes()._replace(sizes=torch.tensor([6, 2]))
    layout = pack_in_frame([Work(0, 19, 1, 6), Work(1, 8, 1, 6)], table, 8, fewer, 2).layout
    assert [one.rows for one in cut(layout)][3:] == [[7, 8], [9]]


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("name", [*SHOWN, "falcon_alibi", "gemma3", "gpt_neo", "llama4_text"])
def test_a_row_of_a_tree_says_what_its_path_says(name: str, kernels: str) -> None:
    model, table = make(name), tables()
    loaded = loader.build(loader.find(model), torch.float32, CPU, kernels, 64)
    cache = KVCache(PagePool(16, 8), CPU)
    cache.layers = cache.add_layers(loaded.model.layer_specs(torch.float32))
    loaded.model.forward(pack([Work(0, 0, 19), Work(1, 0, 8)], table, 8), cache.layers)
    batch = tree_batch(table)
    found = loaded.model.forward(batch, cache.layers, rows=torch.arange(14)).logits
    assert found is not None
    for number, (text, tokens) in enumerate(zip(TEXTS, TOKENS)):
        for row, path in enumerate([[], *PATHS]):
            with torch.no_grad():
                wanted = model(torch.tensor([text + [tokens[node] for node in path]])).logits[0, -1]
            assert (found[7 * number + row] - wanted).abs().max() <= 1e-4, (number, row)
