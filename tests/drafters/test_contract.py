"""Every drafter in every situation, every pair of (drafter, situation, batch, sampling setting): token for token what
plain decoding says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from paceline import LLM
from paceline.kernels.cpu.library import library
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.fakes import Replay, Scratching, tiny_llm

BATCHES = (1, 3)
SITUATIONS = {
    "fresh": {},
    "chunked": {"max_batched_tokens": 9},
    "preempted": {"prefix_caching": False},
    "small_pages": {"block_size": 4},
    "behind_1": {"behind": 1},
    "behind_2": {"behind": 2, "block_size": 4},
    "behind_2_preempted": {"behind": 2, "prefix_caching": False},
}


def outputs_of(llm: LLM, batch: int, setting: str, **changes: int) -> list[list[int]]:
    params = dataclasses.replace(SETTINGS[setting], **changes)
    outputs = [output.outputs[0] for output in llm.generate(prompts(batch), params)]
    for output in outputs:
        assert len(output.provenance) == len(output.token_ids) == output.stats.tokens
    llm.engine.cache.pool.check()
    assert llm.engine.table.num_free == llm.options.max_num_seqs
    assert not llm.engine.has_work
    return [output.token_ids for output in outputs]


def pairwise() -> list[tuple[str, int, str, str]]:
    """Each drafter in each situation, with batches and settings in turn."""
    rows = []
    for first, name in enumerate(DRAFTERS):
        for second, situation in enumerate(SITUATIONS):
            setting = list(SETTINGS)[(first + second) % len(SETTINGS)]
            rows.append((name, BATCHES[(first + second + second // 3) % 2], situation, setting))
    return rows


def test_every_pair_is_run() -> None:
    rows = pairwise()
    for one, other in itertools.combinations(range(4), 2):
        values = [(DRAFTERS, BATCHES, SITUATIONS, SETTINGS)[factor] for factor in (one, other)]
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(*values))


@pytest.mark.parametrize("name, batch, situation, setting", pairwise())
def test_a_drafter_changes_no_token(name: str, batch: int, situation: str, setting: str) -> None:
    options = dict(SITUATIONS[situation])
    if "preempted" in situation:
        options["max_model_len"] = 100 if batch == 3 else 90
        options["num_pages"] = -(-options["max_model_len"] // 16) + 1
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), **options)
    assert outputs_of(llm, batch, setting) == plain(batch, setting)
    if "preempted" in situation and batch == 3:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prefix_hit_and_a_budget_of_zero_change_no_token(name: str, setting: str) -> None:
    batch = BATCHES[(list(DRAFTERS).index(name) + list(SETTINGS).index(setting)) % 2]
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), block_size=4)
    first = outputs_of(llm, batch, setting)
    again = llm.generate(prompts(batch), SETTINGS[setting])
    hits = [output.outputs[0].stats.prefix_hit for output in again]
    assert all(hits), "a test of prefix hits needs some"
    assert [output.outputs[0].token_ids for output in again] == first == plain(batch, setting)
    assert outputs_of(llm, batch, setting, max_draft_tokens=0) == first
    assert outputs_of(llm, batch, setting, max_draft_tokens=2) == first


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_replay_accepts_every_length_and_every_branch(
    setting: str, trees: bool, record_property: Callable[[str, object], None]
) -> None:
    """The honesty of the suite: equality is only worth something if everything that can be accepted was."""
    replay = Replay(recorded(3, setting), seed=0, trees=trees)
    llm = tiny_llm(replay)
    for number in range(12):
        replay.seed = number
        assert outputs_of(llm, 3, setting) == plain(3, setting)
    lengths, branches = (dict(sorted(c.items())) for c in (replay.histogram.lengths, replay.histogram.branches))
    record_property("shown", f"{setting}, {'tree' if trees else 'chain'}: accepted {lengths}, branches {branches}")
    assert set(lengths) >= set(range(Replay.max_depth + 1))
    assert set(branches) == set(range(Replay.max_siblings if trees else 1))


@pytest.mark.parametrize("setting", SETTINGS)
def test_scratch_nodes_are_never_accepted_and_their_logits_are_shown(setting: str) -> None:
    drafter = Scratching(recorded(3, setting), seed=1)
    llm = tiny_llm(drafter)
    assert outputs_of(llm, 3, setting) == plain(3, setting)
    assert max(drafter.num_logits) > 2 and sum(drafter.histogram.lengths.values()) > 0


@pytest.mark.parametrize("behind", [None, 1, 2])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "replay_tree", "drawn_tree", "pair_reader"])
def test_the_native_kernels_keep_the_contract_on_shared_and_on_static_batches(name: str, behind: int | None) -> None:
    if library() is None:
        pytest.skip("the native kernels are not built here")
    wanted = outputs_of(tiny_llm(kernels="native"), 3, "seeded")
    known = {tuple(p): p + out for p, out in zip(prompts(3), wanted)}
    llm = tiny_llm(DRAFTERS[name](known), behind, kernels="native", block_size=4)
    assert outputs_of(llm, 3, "seeded") == wanted
