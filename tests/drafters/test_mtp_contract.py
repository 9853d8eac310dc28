"""MiMo, GLM-4.5 and DeepSeek with their own modules, in every situation: token for token what plain decoding says."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, MTP
from paceline.testing import (
    BATCHES,
    ROUNDS,
    SETTINGS,
    SITUATIONS,
    closed_lists,
    launch,
    prompts,
    set_apart,
    tokens_of,
)
from tests.drafters.mtp_models import KINDS, model_of, write_apart, write_whole
from tests.drafters.tiny_mtp import write_mimo

TARGETS = ("mimo", *KINDS)
MODULES = {"mimo": 1, "glm4_moe": 2, "deepseek_v3": 1}
HELD = tempfile.TemporaryDirectory(prefix="paceline-mtp-")


@functools.cache
def folder_of(kind: str) -> str:
    folder = Path(HELD.name) / kind
    return write_mimo(folder) if kind == "mimo" else write_whole(folder, kind, MODULES[kind])


def llm_of(kind: str, drafter: Any, behind: int | None = None, **options: Any) -> LLM:
    given = {"kernels": "reference", "max_model_len": 200, "device": "cpu", **options}
    llm = LLM(folder_of(kind), None if behind is not None else drafter, **given)
    if behind is not None:
        set_apart(llm, behind)
        llm.set_drafter(MTP(folder_of(kind), drafter.num_draft_tokens))
    return llm


@functools.cache
def plain(kind: str, batch: int, setting: str) -> list[list[int]]:
    return tokens_of(llm_of(kind, None), batch, setting)


def rows() -> list[tuple[str, int, str, str]]:
    """Each target in each situation, with batches and settings in turn."""
    return [
        (kind, BATCHES[(first + second + second // 3) % 2], situation, list(SETTINGS)[(first + second) % 3])
        for first, kind in enumerate(TARGETS)
        for second, situation in enumerate(SITUATIONS)
    ]


@pytest.mark.parametrize("kind, batch, situation, setting", rows())
def test_modules_change_no_token(kind: str, batch: int, situation: str, setting: str) -> None:
    llm = llm_of(kind, MTP(num_draft_tokens=3), **SITUATIONS[situation])
    assert tokens_of(llm, batch, setting) == plain(kind, batch, setting)
    if "preempted" in situation and batch == 3:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("number, kind", list(enumerate(TARGETS)))
def test_a_prefix_hit_and_a_budget_of_zero_change_no_token(number: int, kind: str) -> None:
    setting, batch = list(SETTINGS)[number % 3], BATCHES[number % 2]
    llm = llm_of(kind, MTP(num_draft_tokens=3), block_size=4)
    first = tokens_of(llm, batch, setting)
    again = llm.generate(prompts(batch), SETTINGS[setting])
    assert all(output.outputs[0].stats.prefix_hit for output in again), "a test of prefix hits needs some"
    assert [output.outputs[0].token_ids for output in again] == first == plain(kind, batch, setting)
    assert tokens_of(llm, batch, setting, max_draft_tokens=0) == first


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_reads_nothing_and_no_module_loops_over_sequences(kind: str, setting: str, tmp_path: Path) -> None:
    """On a device without data; targets and modules have experts."""
    llm = LLM(model_of(kind), device="meta", kernels="torch", max_model_len=64, max_num_seqs=4)
    llm.engine.depth = 1000
    llm.set_drafter(MTP(write_apart(tmp_path, kind, 2), 3))
    with closed_lists():
        launch(llm, setting)
    assert len(llm.engine._in_flight) == ROUNDS
