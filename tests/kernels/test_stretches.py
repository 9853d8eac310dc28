"""Attention over many stretches of positions: merged by one thread or several, in whatever company, the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from paceline.drafters.tree import Proposal, paths
from paceline.kernels.cpu.library import library
from paceline.models import loader
from paceline.models.batch import Work
from tests.kernels.tiny import CPU, GATED, VOCAB, Table, path_of, random_tree, same_bits, tokens

LONGEST = 700
STRETCH = 128  # as in csrc/packed.h
ENDS = (STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH, 500, 640)
SHAPE = {**GATED, "max_position_embeddings": LONGEST}
CONFIGS = {  # one kv head for all, two, as many as query heads; widths with and without a loop of their own; windows
    "64": transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, head_dim=64),
    "128": transformers.LlamaConfig(**SHAPE, head_dim=128),
    "8": transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "window": transformers.MistralConfig(**SHAPE, sliding_window=200, head_dim=64),
}


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    found = library()
    assert found is not None
    found.paceline_threads(request.param)
    yield request.param
    found.paceline_threads(1)


def table_of(name: str, kernels: str = "native") -> Table:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval().float()
    loaded = loader.build(loader.find(model), torch.float32, CPU, kernels, LONGEST)
    table = Table(loaded, longest=LONGEST)
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


@pytest.mark.parametrize("name", CONFIGS)
def test_long_texts_agree_with_the_reference(name: str, threads: int) -> None:
    results = []
    for kernels in ("native", "reference"):
        table = table_of(name, kernels)
        table.run([Work(0, 0, 300)])
        results.append(table.run([Work(0, 300, 6)]).final)
    assert (results[0] - results[1]).abs().max() <= 2e-5
    assert results[1].std() > 0.05
