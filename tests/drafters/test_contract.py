"""Every drafter × batch × situation × sampling setting: token for token what plain decoding says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from paceline import LLM
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.fakes import Replay, Scratching, make_late, tiny_llm

SITUATIONS = {
    "fresh": {},
    "chunked": {"max_batched_tokens": 9},
    "preempted": {"num_pages": 14, "prefix_caching": False},
    "small_pages": {"block_size": 4},
    "late": {},
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_changes_no_token(name: str, batch: int, situation: str, setting: str) -> None:
    options = dict(SITUATIONS[situation])
    if situation == "preempted":
        options["max_model_len"] = 100 if batch == 3 else 90
        options["num_pages"] = -(-options["max_model_len"] // 16) + 1
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), **options)
    if situation == "late":
        make_late(llm)
    assert outputs_of(llm, batch, setting) == plain(batch, setting)
    if situation == "preempted" and batch == 3:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prefix_hit_and_a_budget_of_zero_change_no_token(name: str, batch: int, setting: str) -> None:
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
        replay.random.seed(number)
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
