"""A row's result depends on that row alone: the same bits whatever rows, chunks, sequences or branches ride along.

The yardstick is always the same: the sequence decoded token by token, alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.tree import Proposal, paths
from paceline.models.base import FINAL
from paceline.models.batch import Work
from tests.kernels.tiny import (
    ALL,
    BLOCK_SIZE,
    CONFIGS,
    CPU,
    VOCAB,
    Table,
    load,
    path_of,
    random_tree,
    same_bits,
    tokens,
)

LENGTH = 64
TREES = 20


def test_what_is_compared_varies() -> None:
    """Equal bits of states that hardly differ, or of attention that sees one position only, would prove nothing."""
    for name in ALL:
        table = Table(load(name))
        table.begin(0, tokens(LENGTH, 1))
        table.begin(1, [(tokens(LENGTH, 1)[0] + 1) % VOCAB, *tokens(LENGTH, 1)[1:]])
        left, right = (table.run([Work(slot, 0, LENGTH)]).final for slot in (0, 1))
        assert left.isfinite().all() and left.std(dim=0).min() > 0.01, name
        assert not torch.equal(left[5], right[5]), f"{name}: position 5 does not see position 0"


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_rows_at_once_gives_the_bits_of_one(name: str) -> None:
    loaded = load(name)
    table = Table(loaded)
    prompt = tokens(LENGTH, 1)
    table.begin(0, prompt)
    wanted = table.one_by_one(0, 0, LENGTH)
    logits = torch.cat([loaded.model.logits(row[None]) for row in wanted])
    for rows in range(1, LENGTH + 1):
        other = rows % 3 + 1
        table.begin(other, prompt)
        parts = [table.run([Work(other, start, min(rows, LENGTH - start))]).final for start in range(0, LENGTH, rows)]
        assert same_bits(torch.cat(parts), wanted), rows
        assert same_bits(torch.cat([loaded.model.logits(part) for part in parts]), logits), rows


@pytest.mark.parametrize("name", ALL)
def test_random_chunks_beside_other_sequences_give_the_bits_of_each_alone(name: str) -> None:
    loaded = load(name)
    rng = np.random.default_rng(3)
    prompts = [tokens(length, 10 + n) for n, length in enumerate((LENGTH, 47, 33, 9))]
    wanted = []
    for prompt in prompts:
        alone = Table(loaded)
        alone.begin(2, prompt)
        wanted.append(alone.one_by_one(2, 0, len(prompt)))
    for _ in range(6):
        table = Table(loaded)
        done = [0] * len(prompts)
        for slot, prompt in enumerate(prompts):
            table.begin(slot, prompt)
        while any(at < len(prompt) for at, prompt in zip(done, prompts)):
            waiting = [slot for slot, prompt in enumerate(prompts) if done[slot] < len(prompt)]
            chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
            counts = [min(int(rng.geometric(0.15)), len(prompts[slot]) - done[slot]) for slot in chosen]
            final = table.run([Work(slot, done[slot], count) for slot, count in zip(chosen, counts)]).final
            for slot, count, rows in zip(chosen, counts, final.split(counts)):
                assert same_bits(rows, wanted[slot][done[slot] : done[slot] + count])
                done[slot] += count


def grow(rng: np.random.Generator, most: int) -> tuple[list[int], list[int]]:
    parents = random_tree(rng, int(rng.integers(1, most + 1)))
    return rng.integers(0, VOCAB, len(parents)).tolist(), parents


def decode_path(table: Table, slot: int, committed: list[int], path: list[int]) -> torch.Tensor:
    """The states of the tokens of `path`, decoded one after another behind the committed tokens."""
    table.begin(slot, committed + path)
    return table.one_by_one(slot, len(committed), len(committed) + len(path))


def check_round(loaded: Any, rng: np.random.Generator, seen: Counter[int]) -> int:
    """One batch: two trees and a chunk of a third prompt. Every node against its path; answers how many there were."""
    table, alone = Table(loaded), Table(loaded)
    lengths = [int(rng.integers(1, 40)), BLOCK_SIZE * int(rng.integers(1, 3)), int(rng.integers(2, 30))]
    prompts = [tokens(length, int(rng.integers(1 << 30))) for length in lengths]
    trees = [grow(rng, 24), grow(rng, 24)]
    for slot, prompt in enumerate(prompts):
        table.begin(slot, prompt)
        alone.begin(slot, prompt)
    for slot in (0, 1):
        if lengths[slot] > 1:
            table.run([Work(slot, 0, lengths[slot] - 1)])
        alone.run([Work(slot, 0, lengths[slot])])
    proposal = Proposal.of_trees(trees, CPU, "random")
    sizes = proposal.sizes.tolist()
    work = [Work(slot, lengths[slot] - 1, 1, sizes[slot]) for slot in (0, 1)] + [Work(2, 0, lengths[2])]
    final = table.run(work, (proposal.tokens, paths(proposal.parents))).final
    row = 0
    for slot, (ids, parents) in enumerate(trees):
        row += 1
        for leaf in set(range(len(ids))) - set(parents):
            path = path_of(parents, leaf)
            wanted = decode_path(alone, slot, prompts[slot], [ids[node] for node in path])
            for depth, node in enumerate(path):
                assert same_bits(final[row + node], wanted[depth]), (prompts[slot], ids, parents, node)
            seen.update(range(1, len(path) + 1))
        row += len(ids)
    assert same_bits(final[row:], alone.one_by_one(2, 0, lengths[2]))
    return sum(sizes)


@pytest.mark.parametrize("name", ALL)
def test_every_node_of_random_trees_has_the_bits_of_its_path_decoded_token_by_token(name: str) -> None:
    rng = np.random.default_rng(11)
    seen: Counter[int] = Counter()
    nodes = sum(check_round(load(name), rng, seen) for _ in range(TREES // 2))
    assert nodes > 10 * TREES and len(seen) >= 8, "trees this small or shallow would prove little"


@pytest.mark.parametrize("name", CONFIGS)
def test_taps_are_those_of_the_torch_kernels_and_row_invariant(name: str) -> None:
    prompt, taps = tokens(50, 4), (0, 2, FINAL, 1)
    tapped = {}
    for kernels in ("native", "torch"):
        table = Table(load(name, kernels))
        table.begin(0, prompt)
        tapped[kernels] = table.run([Work(0, 0, 50)], taps=taps).tapped
    native = tapped["native"]
    assert (native - tapped["torch"]).norm() <= 1e-3 * tapped["torch"].norm()
    assert ((native - tapped["torch"]).abs() <= 1e-3 * tapped["torch"].abs().max()).all()
    table = Table(load(name))
    table.begin(0, prompt)
    rows = [table.run([Work(0, position, 1)], taps=taps) for position in range(50)]
    assert same_bits(torch.cat([row.tapped for row in rows]), native)
    final = torch.cat([row.final for row in rows])  # OPT-350m's is narrower than the other boundaries
    before = 2 * load(name).config.hidden_size
    assert same_bits(final, native[:, before : before + final.shape[1]].contiguous())
