"""Native and torch kernels against the reference on float weights, to stated tolerances; and the reference's form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.drafters.tree import Proposal, paths
from paceline.kernels.cpu.library import library
from paceline.kernels.eager import EagerForward
from paceline.kernels.ops import Heads, Inputs
from paceline.kernels.reference import ReferenceForward, reference_attention, reference_linear
from paceline.models.batch import Batch, Nodes, Work, pack
from tests.kernels.tiny import BLOCK_SIZE, CONFIGS, CPU, HALVES, VOCAB, Table, load, random_tree, tokens

TOLERANCE = 1e-4
LENGTHS = (33, 16, 7)


def tree_round(name: str, kernels: str, seed: int) -> Tensor:
    """Final states and logits of a prompt chunk, two trees and a chain of one node, in one batch."""
    rng = np.random.default_rng(seed)
    loaded = load(name, kernels)
    table = Table(loaded)
    for slot, length in enumerate(LENGTHS):
        table.begin(slot, tokens(length, slot))
        table.run([Work(slot, 0, length - 1)])
    table.begin(3, tokens(70, 9))
    sizes = (14, 9, 1)
    trees = [(rng.integers(0, VOCAB, size).tolist(), random_tree(rng, size)) for size in sizes]
    proposal = Proposal.of_trees(trees, CPU, "random")
    work = [Work(slot, LENGTHS[slot] - 1, 1, sizes[slot]) for slot in range(3)] + [Work(3, 0, 70)]
    final = table.run(work, (proposal.tokens, paths(proposal.parents))).final
    return torch.cat([final, loaded.model.logits(final)], dim=1)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", [*CONFIGS, *HALVES])
def test_forwards_are_the_reference_s(name: str, kernels: str) -> None:
    for seed in range(3):
        wanted = tree_round(name, "reference", seed)
        assert (tree_round(name, kernels, seed) - wanted).abs().max() <= TOLERANCE
        assert wanted.std() > 0.05


def test_exponentials_are_within_two_units_in_the_last_place() -> None:
    found = library()
    assert found is not None
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            np.linspace(-87, 88, 200_001),
            rng.uniform(-1, 1, 100_000),
            rng.uniform(-1e-6, 1e-6, 1000),
            [0.0, -0.0, 88, -87],
        ]
    ).astype(np.float32)
    out = np.empty_like(x)
    found.paceline_exp(x.ctypes.data, len(x), out.ctypes.data)
    exact = np.exp(x.astype(np.float64))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(out - exact) / unit).max() <= 2
    assert out[-4] == out[-3] == 1.0


def test_exponentials_beyond_their_range_stay_at_its_ends_and_keep_nan() -> None:
    found = library()
    assert found is not None
    x = np.array([-87.0, -100.0, -np.inf, 88.0, 200.0, np.inf, np.nan], np.float32)
    out = np.empty_like(x)
    found.paceline_exp(x.ctypes.data, len(x), out.ctypes.data)
    assert out[1] == out[2] == out[0] and out[4] == out[5] == out[3]
    assert np.isnan(out[6])


# ---- attention alone


def attention_batch(rng: np.random.Generator, with_first: bool, with_trees: bool) -> tuple[Batch, Table]:
    """Four sequences of random lengths, a random tree behind each; `first` hides some of their beginnings."""
    table = Table(load("llama", "torch"))
    lengths = rng.integers(1, 70, 4).tolist()
    for slot, length in enumerate(lengths):
        table.begin(slot, tokens(length, slot))
    sizes = rng.integers(1, 14, 4).tolist()
    trees = [(rng.integers(0, VOCAB, size).tolist(), random_tree(rng, size)) for size in sizes]
    proposal = Proposal.of_trees(trees, CPU, "random")
    counts = [int(rng.integers(1, length + 1)) for length in lengths]
    work = [
        Work(slot, length - count, count, size)
        for slot, (length, count, size) in enumerate(zip(lengths, counts, sizes))
    ]
    # At most the first row's own position, so that every row sees something.
    first = torch.tensor([int(rng.integers(0, item.start + 1)) for item in work]) if with_first else None
    nodes = Nodes(proposal.tokens, proposal.sizes, proposal.paths() if with_trees else None)
    batch = pack(work, table.slots, BLOCK_SIZE, nodes)
    batch.layout.first = None if first is None else first[batch.places.owner]
    return batch, table


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("with_trees", [True, False])
@pytest.mark.parametrize("with_first", [True, False])
def test_torch_attention_is_the_reference_s(with_first: bool, with_trees: bool, window: int | None) -> None:
    rng = np.random.default_rng(5)
    heads = Heads(4, 2, 8)
    for _ in range(8):
        batch, table = attention_batch(rng, with_first, with_trees)
        qkv = torch.from_numpy(rng.standard_normal((len(batch.ids), 8 * 8)).astype(np.float32))
        keys, values = table.cache.layers[0]
        keys.copy_(torch.from_numpy(rng.standard_normal(keys.shape).astype(np.float32)))
        values.copy_(torch.from_numpy(rng.standard_normal(values.shape).astype(np.float32)))
        inputs = Inputs(batch.ids, batch.layout)
        found = EagerForward(inputs, table.cache.layers, ()).attention(qkv, heads, 0, window)
        wanted = ReferenceForward(inputs, table.cache.layers, ()).attention(qkv, heads, 0, window)
        assert (found - wanted).abs().max() <= 1e-5


def seen_by_hand(batch: Batch, table: Table, row: int, window: int | None) -> list[int]:
    """The cache rows one row may see, from the words of `Layout` alone."""
    layout = batch.layout
    position, base = int(layout.positions[row]), int(layout.tree_base[row])
    lowest = 0 if layout.first is None else int(layout.first[row])
    if window is not None:
        lowest = max(lowest, position - window + 1)
    pages = table.slots.pages.host[int(layout.slots[row])]
    found = []
    for at in range(lowest, position + 1):
        line = at if layout.path is None or at < base else base + int(layout.path[row, at - base])
        found.append(int(pages[line // BLOCK_SIZE]) * BLOCK_SIZE + line % BLOCK_SIZE)
    return found


@pytest.mark.parametrize("with_first", [True, False])
def test_reference_attention_is_a_softmax_over_what_a_row_may_see(with_first: bool) -> None:
    rng = np.random.default_rng(6)
    heads = Heads(4, 2, 8)
    for window in (None, 3):
        batch, table = attention_batch(rng, with_first, with_trees=True)
        qkv = torch.from_numpy(rng.standard_normal((len(batch.ids), 8 * 8)).astype(np.float32))
        forward = ReferenceForward(Inputs(batch.ids, batch.layout), table.cache.layers, ())
        found = forward.attention(qkv, heads, 0, window).view(-1, 4, 8)
        keys, values = (cache.double() for cache in table.cache.layers[0])
        for row in range(len(batch.ids)):
            seen = seen_by_hand(batch, table, row, window)
            for head in range(4):
                scores = keys[seen, head // 2] @ qkv[row].view(8, 8)[head].double() / 8**0.5
                wanted = torch.softmax(scores, 0) @ values[seen, head // 2]
                assert (found[row, head] - wanted).abs().max() <= 1e-3 * max(1, values[seen].abs().max())


def test_native_attention_honours_the_first_visible_position() -> None:
    prompt = tokens(60, 3)
    first = torch.tensor([13])
    results = {}
    for kernels in ("native", "reference"):
        for name in ("llama", "llama_64", "mistral_window"):
            table = Table(load(name, kernels))
            table.begin(0, prompt)
            table.run([Work(0, 0, 40)])
            results[kernels, name] = table.run([Work(0, 40, 20)], first=first).final
            whole = table.run([Work(0, 40, 20)]).final
            windowed = name == "mistral_window"  # its 8 positions hide the beginning anyway
            assert torch.equal(whole, results[kernels, name]) == windowed
    for name in ("llama", "llama_64", "mistral_window"):
        assert (results["native", name] - results["reference", name]).abs().max() <= TOLERANCE


# ---- registration


@pytest.mark.filterwarnings("ignore")
def test_the_reference_operations_are_registered_whole() -> None:
    """Schema, fake implementation and registration, as torch.library checks them."""
    tests = ("test_schema", "test_faketensor")
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    for arguments in ((x, weight, bias), (x, weight, None), (x[:0], weight, None)):
        torch.library.opcheck(reference_linear, arguments, test_utils=tests)
    query, keys, values = torch.randn(2, 4, 8), torch.randn(32, 2, 8), torch.randn(32, 2, 8)
    lines = [torch.arange(5), torch.tensor([9, 3, 30])]
    for softcap in (None, 2.0):
        torch.library.opcheck(reference_attention, (query, keys, values, lines, 0.3, softcap), test_utils=tests)


def test_the_fake_implementations_give_shapes_without_computing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        product = reference_linear(torch.empty(7, 8), torch.empty(5, 8), None)
        looked = reference_attention(
            torch.empty(2, 4, 8),
            torch.empty(9, 2, 8),
            torch.empty(9, 2, 8),
            [torch.empty(3, dtype=torch.int64)] * 2,
            0.5,
            None,
        )
    assert product.shape == (7, 5) and looked.shape == (2, 4, 8)
