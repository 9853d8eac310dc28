"""Every drafter in every situation, every pair of (drafter, situation, batch, sampling setting): token for token what
plain decoding says. On the native kernels every pair of (drafter, batch, setting, dtype, rounds behind,
threads)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from paceline.testing import BATCHES, SETTINGS, SITUATIONS, plain, prompts, tokens_of
from tests.drafters.contract import DRAFTERS, recorded
from tests.fakes import Replay, Scratching, tiny_llm
from tests.native import needs_native, on_threads
from tests.pairs import missing

DTYPES = ("auto", "bfloat16", "float16")  # of matrices on the native kernels; auto: as they are, in 32 bits
BEHIND = (None, 1, 2)
THREADS = (1, 2)


def pairwise() -> list[tuple[str, int, str, str]]:
    """Each drafter in each situation, with batches and settings in turn."""
    rows = []
    for first, name in enumerate(DRAFTERS):
        for second, situation in enumerate(SITUATIONS):
            setting = list(SETTINGS)[(first + second) % len(SETTINGS)]
            rows.append((name, BATCHES[(first + second + second // 3) % 2], situation, setting))
    return rows


def pairwise_native() -> list[tuple[str, int, str, str, int | None, int]]:
    """Each drafter on shared batches and on static ones, with batches, settings, dtypes and threads in turn."""
    rows = []
    for first, name in enumerate(DRAFTERS):
        for second, behind in enumerate(BEHIND):
            setting, dtype = list(SETTINGS)[(first + second) % 3], DTYPES[(first // 3 + second) % 3]
            batch, threads = BATCHES[(first // 9 + first + second) % 2], THREADS[(first // 2 + second) % 2]
            rows.append((name, batch, setting, dtype, behind, threads))
    return rows


ROWS = pairwise()


@pytest.mark.parametrize(
    "rows, factors",
    [
        (ROWS, (DRAFTERS, BATCHES, SITUATIONS, SETTINGS)),
        (pairwise_native(), (DRAFTERS, BATCHES, SETTINGS, DTYPES, BEHIND, THREADS)),
    ],
    ids=["reference", "native"],
)
def test_every_pair_is_run(rows: list[tuple[Any, ...]], factors: tuple[Any, ...]) -> None:
    assert not missing(rows, factors)


@pytest.mark.parametrize("name, batch, situation, setting", [row for row in ROWS if row[2] != "small_pages"])
def test_a_drafter_changes_no_token(name: str, batch: int, situation: str, setting: str) -> None:
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), **SITUATIONS[situation])
    assert tokens_of(llm, batch, setting) == plain(batch, setting)
    if "preempted" in situation and batch == 3:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name, batch, situation, setting", [row for row in ROWS if row[2] == "small_pages"])
def test_small_pages_prefix_hits_and_a_budget_of_zero_change_no_token(
    name: str, batch: int, situation: str, setting: str
) -> None:
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), **SITUATIONS[situation])
    first = tokens_of(llm, batch, setting)
    again = llm.generate(prompts(batch), SETTINGS[setting])
    hits = [output.outputs[0].stats.prefix_hit for output in again]
    assert all(hits), "a test of prefix hits needs some"
    assert [output.outputs[0].token_ids for output in again] == first == plain(batch, setting)
    assert tokens_of(llm, batch, setting, max_draft_tokens=0) == first
    assert tokens_of(llm, batch, setting, max_draft_tokens=2) == first


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_replay_accepts_every_length_and_every_branch(
    setting: str, trees: bool, record_property: Callable[[str, object], None]
) -> None:
    """The honesty of the suite: equality is only worth something if everything that can be accepted was."""
    replay = Replay(recorded(3, setting), seed=0, trees=trees)
    llm = tiny_llm(replay)
    for number in range(6):
        replay.seed = number
        assert tokens_of(llm, 3, setting) == plain(3, setting)
    lengths, branches = (dict(sorted(c.items())) for c in (replay.histogram.lengths, replay.histogram.branches))
    record_property("shown", f"{setting}, {'tree' if trees else 'chain'}: accepted {lengths}, branches {branches}")
    assert set(lengths) >= set(range(Replay.max_depth + 1))
    assert set(branches) == set(range(Replay.max_siblings if trees else 1))


@pytest.mark.parametrize("setting", SETTINGS)
def test_scratch_nodes_are_never_accepted_and_their_logits_are_shown(setting: str) -> None:
    drafter = Scratching(recorded(3, setting), seed=1)
    llm = tiny_llm(drafter)
    assert tokens_of(llm, 3, setting) == plain(3, setting)
    assert max(drafter.num_logits) > 2 and sum(drafter.histogram.lengths.values()) > 0


@functools.cache
def plain_native(batch: int, setting: str, dtype: str) -> list[list[int]]:
    llm = tiny_llm(kernels="auto", dtype=dtype)
    assert llm.model.ops.name == "native"
    return tokens_of(llm, batch, setting)


@needs_native
@pytest.mark.parametrize("name, batch, setting, dtype, behind, threads", pairwise_native())
def test_a_drafter_changes_no_token_on_the_native_kernels(
    name: str, batch: int, setting: str, dtype: str, behind: int | None, threads: int
) -> None:
    wanted = plain_native(batch, setting, dtype)
    known = {tuple(p): p + out for p, out in zip(prompts(batch), wanted)}
    llm = tiny_llm(DRAFTERS[name](known), behind, kernels="auto", dtype=dtype, block_size=4)
    assert llm.model.ops.name == "native"
    with on_threads(threads):
        assert tokens_of(llm, batch, setting) == wanted
