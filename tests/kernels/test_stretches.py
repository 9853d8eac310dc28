"""Attention over many stretches of positions: merged by one thread or several, in whatever company, the same bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from paceline.drafters.tree import Proposal, paths
from paceline.kernels.cpu.library import library
from paceline.kernels.ops import TOGETHER, LayerCache
from paceline.models import loader
from paceline.models.batch import Work
from tests.kernels.tiny import CPU, GATED, VOCAB, Table, path_of, random_tree, same_bits, tokens

LONGEST = 700
STRETCH = 128  # as in csrc/packed.h
ENDS = (STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH, 500, 640)
SHAPE = {**GATED, "max_position_embeddings": LONGEST}


def deepseek(**widths: int) -> transformers.DeepseekV3Config:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    sizes |= {"q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "max_position_embeddings": LONGEST}
    config = transformers.DeepseekV3Config(vocab_size=VOCAB, initializer_range=0.2, **{**sizes, **widths})
    config.num_key_value_heads = config.num_attention_heads
    return config


# One kv head for all, two, as many as query heads; widths with and without a loop of their own; windows; one row for
# all heads, and values of a width of their own.
CONFIGS = {
    "64": transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, head_dim=64),
    "128": transformers.LlamaConfig(**SHAPE, head_dim=128),
    "8": transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "window": transformers.MistralConfig(**SHAPE, sliding_window=200, head_dim=64),
    "latent": deepseek(num_attention_heads=20, kv_lora_rank=128, v_head_dim=16),
    "latent_any": deepseek(num_attention_heads=5, kv_lora_rank=20, v_head_dim=10),
    "naive": deepseek(num_attention_heads=4, kv_lora_rank=20, v_head_dim=64),
    "naive_any": deepseek(num_attention_heads=3, kv_lora_rank=20, v_head_dim=10),
}


@pytest.fixture(params=(1, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    found = library()
    assert found is not None
    found.paceline_threads(request.param)
    yield request.param
    found.paceline_threads(1)


@functools.cache
def load(name: str, kernels: str) -> loader.Loaded:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval().float()
    found = loader.find(model)
    if "naive" in name:
        found.config = found.config.naive()
    return loader.build(found, torch.float32, CPU, kernels, LONGEST)


def table_of(name: str, kernels: str = "native", block_size: int = 16) -> Table:
    table = Table(load(name, kernels), longest=LONGEST, block_size=block_size)
    for slot in range(3):
        table.begin(slot, tokens(LONGEST - 10, 1))
    return table


def alone(name: str) -> dict[int, Tensor]:
    """Final states at some positions, each computed by itself on one thread."""
    table = table_of(name)
    found = {}
    for start, stop in zip((0, *ENDS), ENDS):
        table.run([Work(0, start, stop - start)])
        found[stop] = table.run([Work(0, stop, 1)]).final
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_far_into_a_text_has_its_bits_in_every_company(name: str, threads: int) -> None:
    wanted = alone(name)
    for together in (1, 5, 8, 40, 127):
        table = table_of(name)
        for end in ENDS:
            start = max(0, end + 1 - together)
            table.run([Work(1, 0, start)]) if start else None
            beside = Work(2, 0, 3)  # another sequence, so that there are groups of both kinds
            rows = table.run([Work(1, start, end + 1 - start), beside]).final
            assert same_bits(rows[end - start][None], wanted[end]), (together, end)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_node_of_a_tree_over_a_stretch_s_end_has_its_path_s_bits(name: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    for base in (STRETCH - 3, 2 * STRETCH - 1, 400):
        table = table_of(name)
        table.run([Work(0, 0, base - 1)])
        drafts, parents = rng.integers(0, VOCAB, 9).tolist(), random_tree(rng, 9)
        proposal = Proposal.of_trees([(drafts, parents)], CPU, "random")
        rows = table.run([Work(0, base - 1, 1, 9)], (proposal.tokens, paths(proposal.parents))).final
        for node in range(9):
            other = table_of(name)
            text = tokens(LONGEST - 10, 1)[:base] + [drafts[above] for above in path_of(parents, node)]
            other.begin(0, text)
            other.run([Work(0, 0, len(text) - 1)])
            assert same_bits(rows[1 + node][None], other.run([Work(0, len(text) - 1, 1)]).final), (base, node)


def far_rows(name: str, kernels: str) -> Tensor:
    table = table_of(name, kernels)
    table.run([Work(0, 0, 300)])
    return table.run([Work(0, 300, 6)]).final


@functools.cache
def far_rows_of_the_reference(name: str) -> Tensor:
    return far_rows(name, "reference")


@pytest.mark.parametrize("name", CONFIGS)
def test_long_texts_agree_with_the_reference(name: str, threads: int) -> None:
    wanted = far_rows_of_the_reference(name)
    assert (far_rows(name, "native") - wanted).abs().max() <= 2e-5
    assert wanted.std() > 0.05


PATHS = ("portable", "avx2", "avx512")
PAGES = [  # each pair of a shape, a size of pages and an instruction set
    (name, size, PATHS[(first + second) % 3])
    for first, name in enumerate(CONFIGS)
    for second, size in enumerate((1, 5, 24, 48))
]


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    found = library()
    assert found is not None
    before = found.paceline_path()
    if not found.paceline_select(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    found.paceline_select(before)


@pytest.mark.parametrize("name, block_size, path", PAGES, indirect=["path"])
def test_the_size_of_pages_does_not_reach_a_result(name: str, block_size: int, path: str) -> None:
    """Keys lie sixteen rows together, wherever pages begin and end among them."""
    rng = np.random.default_rng(block_size)
    drafts, parents = rng.integers(0, VOCAB, 9).tolist(), random_tree(rng, 9)
    proposal = Proposal.of_trees([(drafts, parents)], CPU, "random")
    results = []
    for size in (16, block_size):
        table = table_of(name, block_size=size)
        table.run([Work(0, 0, 150), Work(1, 0, 37)])
        nodes = (proposal.tokens, paths(proposal.parents))
        results.append(table.run([Work(0, 150, 1, 9), Work(1, 37, 90)], nodes).final)
    assert same_bits(results[0], results[1])


def is_key(layer: LayerCache, part: int) -> bool:
    """What a layer of one part holds is as much a value."""
    return part == 0 and len(layer) == 2


def rows_of(tensor: Tensor, are_keys: bool) -> Tensor:
    """[cache rows, heads, D] of what the native kernels keep: a head's keys lie sixteen together, column by column."""
    if not are_keys:
        return tensor.clone()
    rows, heads, width = tensor.shape
    return (
        tensor.transpose(0, 1)
        .reshape(heads, rows // TOGETHER, width, TOGETHER)
        .permute(1, 3, 0, 2)
        .reshape(rows, heads, width)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_moved_as_if_all_were_read_first(name: str) -> None:
    table = table_of(name, block_size=24)
    table.run([Work(0, 0, 60)])
    source, target = torch.tensor([3, 4, 20, 17, 50]), torch.tensor([2, 3, 17, 20, 4])
    before = [[rows_of(part, is_key(layer, i)) for i, part in enumerate(layer)] for layer in table.cache.layers]
    table.loaded.model.ops.keep(table.cache.layers, source, target)
    for layer, parts in zip(table.cache.layers, before):
        for i, part in enumerate(parts):
            part[target] = part[source]
            assert same_bits(rows_of(layer[i], is_key(layer, i)), part)


def test_a_cache_that_lies_otherwise_is_refused() -> None:
    table = table_of("128")
    table.cache.layers = [(keys.contiguous(), values) for keys, values in table.cache.layers]
    with pytest.raises(ValueError, match="16 at a time"):
        table.run([Work(0, 0, 3)])
