"""The words drafter networks are written in, on every set of kernels: the results of plain torch, each row its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.drafters.tree import Proposal, paths
from paceline.kernels import select
from paceline.kernels.cpu.library import library
from paceline.kernels.ops import Forward, Heads, Inputs
from paceline.models.batch import Work
from tests.kernels.networks import HIDDEN, SHAPES, STATES, Blocks, Writer, table_of
from tests.kernels.tiny import CPU, VOCAB, Table, load, path_of, paths_built, random_tree, same_bits, tokens

ALL = ("reference", "torch", "native")
INVARIANT = ("reference", "native")
LENGTH = 40


@pytest.fixture
def restore() -> Iterator[Any]:
    """The library, whose path and threads come back afterwards."""
    found = library()
    assert found is not None
    before = found.paceline_path()
    yield found
    found.paceline_select(before)
    found.paceline_threads(1)


@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("name", SHAPES)
def test_a_network_of_every_word_is_the_one_written_by_hand(name: str, kernels: str) -> None:
    table = table_of(name, kernels)
    for slot, length in ((0, LENGTH), (1, 23)):
        table.begin(slot, tokens(length, slot))
    found = table.run([Work(0, 0, 30), Work(1, 0, 23)]).final
    found = torch.cat([found[:30], table.run([Work(0, 30, LENGTH - 30)]).final, found[30:]])
    network = table.loaded.model
    wanted = torch.cat([network.by_hand(tokens(length, slot)) for slot, length in ((0, LENGTH), (1, 23))])
    assert (found - wanted).abs().max() <= 1e-4 and wanted.std() > 0.3


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_compared_depends_on_every_word(name: str) -> None:
    """Equality would prove nothing about a word whose result hardly matters."""
    table = table_of(name, "torch")
    network = table.loaded.model
    table.begin(0, tokens(LENGTH, 0))
    wanted = network.by_hand(tokens(LENGTH, 0))
    for change in ("states", "target_rows"):
        kept = getattr(network, change)
        setattr(network, change, kept.flip(0))
        assert (network.by_hand(tokens(LENGTH, 0)) - wanted).abs().max() > 0.05, change
        setattr(network, change, kept)
    for change in ("shift", "fusion"):
        network.vectors[change].neg_()
        assert (network.by_hand(tokens(LENGTH, 0)) - wanted).abs().max() > 0.05, change
        network.vectors[change].neg_()
    shape = network.shape
    others = {"scale": 0.3, "softcap": 1000.0, "window": None}
    for change in (change for change in others if getattr(shape, change) is not None):
        network.shape = replace(shape, **{change: others[change]})
        assert (network.by_hand(tokens(LENGTH, 0)) - wanted).abs().max() > 0.01, change
        network.shape = shape
    cos, sin = network.tables[0]
    network.tables = ((cos[:, :-1], sin[:, :-1]), network.tables[1])
    assert (network.by_hand(tokens(LENGTH, 0)) - wanted).abs().max() > 0.01, "the tables' columns"


@pytest.mark.parametrize("kernels", INVARIANT)
@pytest.mark.parametrize("name", SHAPES)
def test_any_number_of_rows_in_any_company_gives_the_bits_of_one(name: str, kernels: str) -> None:
    table = table_of(name, kernels)
    for slot in range(4):
        table.begin(slot, tokens(LENGTH, 1 + slot % 2))
    wanted = [table.one_by_one(slot, 0, LENGTH) for slot in (0, 1)]
    for rows in (2, 3, 7, 16, LENGTH):
        for start in range(0, LENGTH, rows):
            count = min(rows, LENGTH - start)
            found = table.run([Work(3, start, count), Work(2, start, count)]).final
            assert same_bits(found[:count], wanted[1][start : start + count]), (rows, start)
            assert same_bits(found[count:], wanted[0][start : start + count]), (rows, start)


@pytest.mark.parametrize("kernels", INVARIANT)
@pytest.mark.parametrize("name", SHAPES)
def test_every_node_of_a_tree_has_the_bits_of_its_path(name: str, kernels: str) -> None:
    rng = np.random.default_rng(4)
    table, alone = table_of(name, kernels), table_of(name, kernels)
    for base in (7, 22, 32):
        prompt, ids, parents = tokens(base, base), tokens(9, 1 + base), random_tree(rng, 9)
        for one in (table, alone):
            one.loaded.model.most_below = base - 1  # what the target has computed when this round begins
            one.begin(0, prompt)
            one.run([Work(0, 0, base - 1)])
        proposal = Proposal.of_trees([(ids, parents)], CPU, "random")
        final = table.run([Work(0, base - 1, 1, 9)], (proposal.tokens, paths(proposal.parents))).final
        for node in range(9):
            path = path_of(parents, node)
            alone.begin(0, prompt + [ids[above] for above in path])
            wanted = alone.one_by_one(0, base - 1, base + len(path))
            assert same_bits(final[[0, *(1 + above for above in path)]], wanted), (base, node)


def far(name: str) -> Tensor:
    """Rows far into a text, so that a look has several stretches: some alone, some together."""
    table = table_of(name, "native", longest=400, num_slots=2)
    table.begin(0, tokens(400, 6))
    table.begin(1, tokens(400, 7))
    table.run([Work(0, 0, 260), Work(1, 0, 300)])
    rows = [table.run([Work(0, 260, 1)]), table.run([Work(0, 261, 9), Work(1, 300, 2)])]
    hidden = table.loaded.model.forward(table.pack([Work(1, 302, 3)]), table.cache.layers, (0,), torch.tensor([2, 0]))
    assert hidden.logits is not None and hidden.tapped is not None and hidden.logits.shape == (2, VOCAB)
    return torch.cat([*(row.final for row in rows), hidden.final, hidden.tapped, hidden.logits[:, :HIDDEN]])


@pytest.mark.parametrize("name", SHAPES)
def test_every_path_and_thread_count_gives_the_same_bits(name: str, restore: Any) -> None:
    restore.paceline_select(b"portable")
    wanted = far(name)
    assert wanted.isfinite().all() and wanted.std() > 0.3
    for path in paths_built():
        assert restore.paceline_select(path.encode())
        for threads in (1, 3) if path == paths_built()[-1] else (2,):
            restore.paceline_threads(threads)
            assert same_bits(far(name), wanted), (path, threads)


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_of_several_stretches_is_the_one_computed_by_hand(name: str) -> None:
    table = table_of(name, "native", longest=400, num_slots=1)
    table.begin(0, tokens(400, 6))
    table.run([Work(0, 0, 390)])
    found = table.run([Work(0, 390, 10)]).final
    assert (found - table.loaded.model.by_hand(tokens(400, 6))[390:]).abs().max() <= 1e-4


# ---- attention to a borrowed layer


@pytest.mark.parametrize("kernels", ALL)
def test_attention_to_a_borrowed_layer_writes_nothing_and_reads_nothing_above_its_bound(kernels: str) -> None:
    table = table_of("plain", kernels)
    table.begin(0, tokens(LENGTH, 3))
    network = table.loaded.model
    table.run([Work(0, 0, 30)])
    before = [part.clone() for part in table.cache.layers[1]]
    wanted = table.run([Work(0, 30, 10)]).final
    assert all(torch.equal(left, right) for left, right in zip(before, table.cache.layers[1]))
    network.most_below = 35  # what position 39 sees
    assert torch.equal(table.run([Work(0, 30, 10)]).final, wanted)
    batch = table.pack([Work(0, 35, 5)])
    other = Inputs(None, batch.layout, {"qkv": -network.target_rows[35:40]})
    network.ops.run(Writer(network.shape.target), other, table.cache.layers[1:], (), None)
    assert torch.equal(table.run([Work(0, 30, 10)]).final, wanted)
    network.most_below = 34
    assert not torch.equal(table.run([Work(0, 30, 10)]).final, wanted)


class Asking:
    """Queries alone, at layer 0."""

    def __init__(self, heads: Heads, softcap: float | None = None) -> None:
        self.heads, self.softcap = heads, softcap

    def describe(self, f: Forward) -> Any:
        q = f.input("q", self.heads.num_heads * self.heads.head_dim)
        return f.cross_attention(q, self.heads, 0, "below", None, self.softcap)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kernels", ALL)
def test_a_row_that_may_see_nothing_gets_zeros_and_a_hidden_beginning_is_seen(
    kernels: str, softcap: float | None
) -> None:
    table = table_of("plain", kernels)
    network = table.loaded.model
    asking = Asking(network.shape.target, softcap)
    q = torch.randn(6, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    named = {"q": q, "below": torch.tensor([0, 1, 3, 0, 17, 22])}
    results = []
    for first in (None, torch.tensor([12])):
        batch = table.pack([Work(1, 20, 6)], first=first)
        inputs = Inputs(None, batch.layout, named)
        results.append(network.ops.run(asking, inputs, table.cache.layers[1:], (), None).final)
    assert torch.equal(results[0], results[1])
    zero = named["below"] == 0
    assert not results[0][zero].any() and results[0][~zero].abs().min(dim=1).values.gt(0).all()


@pytest.mark.parametrize("kernels", ALL)
def test_a_bound_behind_a_row_s_own_position_ends_there(kernels: str) -> None:
    table = table_of("plain", kernels)
    network = table.loaded.model
    asking, layout = Asking(network.shape.target), table.pack([Work(1, 20, 6)]).layout
    q = torch.randn(6, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    results = []
    for below in (layout.positions + 1, torch.tensor([21, 23, 10_000, 1 << 40, 26, 26])):
        inputs = Inputs(None, layout, {"q": q, "below": below})
        results.append(network.ops.run(asking, inputs, table.cache.layers[1:], (), None).final)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", ["llama", "llama_64", "llama_128"])
def test_what_a_target_has_stored_is_read_in_place(name: str) -> None:
    """The last layer of a real model, filled by its own forward: the same look on every set of kernels."""
    results = {}
    for kernels in ALL:
        table = Table(load(name, kernels))
        table.begin(0, tokens(50, 1))
        table.run([Work(0, 0, 50)])
        shape = table.loaded.config
        heads = Heads(6, shape.num_kv_heads, shape.head_dim)
        q = torch.randn(9, 6 * shape.head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        below = torch.tensor([1, 5, 50, 49, 17, 16, 0, 33, 30])
        inputs = Inputs(None, table.pack([Work(0, 41, 9)]).layout, {"q": q, "below": below})
        network = Asking(heads)
        results[kernels] = table.loaded.model.ops.run(network, inputs, table.cache.layers[-1:], (), None).final
    assert results["reference"].std() > 0.1
    for kernels in ("torch", "native"):
        assert (results[kernels] - results["reference"]).abs().max() <= 1e-4, kernels


# ---- networks without a cache


@pytest.mark.parametrize("kernels", ALL)
def test_a_network_may_have_neither_tokens_nor_positions_nor_a_cache(kernels: str) -> None:
    ops = select(kernels, CPU, torch.float32)
    network = Blocks(ops)
    states = torch.randn(5, STATES, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    wanted = states
    for dense in network.dense:
        wanted = wanted + torch.nn.functional.silu(wanted @ dense.T)
    found = ops.run(network, Inputs(None, None, {"states": states}), (), (), None).final
    assert (found - wanted).abs().max() <= 1e-5
    if kernels in INVARIANT:
        alone = [ops.run(network, Inputs(None, None, {"states": row[None]}), (), (), None).final for row in states]
        assert same_bits(torch.cat(alone), found)
