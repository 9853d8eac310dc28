"""Drafters on a DeepSeek target: token for token what plain decoding says, whatever the situation and the form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from paceline import LLM, DraftModel, EarlyExit, NGram
from paceline.testing import BATCHES, SETTINGS, SITUATIONS, launch, on_nothing, prompts, tiny_llm, tokens_of
from tests.fakes import Recorded, Replay
from tests.models.tiny_deepseek import PACKABLE, tiny_deepseek

DRAFTERS: dict[str, Callable[[Recorded], Any]] = {
    "ngram": lambda known: NGram(5, min_match=1, max_match=3),
    "replay": lambda known: Replay(known, seed=3, trees=False),
    "replay_tree": lambda known: Replay(known, seed=3, trees=True),
    "early_exit": lambda known: EarlyExit(3, layers=1),
    "draft_is_alike": lambda known: DraftModel(model("experts_yarn", packable=True), 3),
}
NATIVE = {  # how the native kernels hold it
    "floats": {},
    "naive": {"mla_use_matrix_absorption": False},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


@functools.cache
def model(name: str, packable: bool = False) -> Any:
    return tiny_deepseek(name, **(PACKABLE if packable else {}))


def deepseek_llm(drafter: Any = None, behind: int | None = None, packable: bool = False, **options: Any) -> LLM:
    return tiny_llm(drafter, behind, model("experts_yarn", packable), **options)


@functools.cache
def plain(batch: int, setting: str, how: str | None = None) -> list[list[int]]:
    """how: on the native kernels."""
    if how is None:
        return tokens_of(deepseek_llm(), batch, setting)
    return tokens_of(deepseek_llm(kernels="native", packable=True, **NATIVE[how]), batch, setting)


def recorded(wanted: list[list[int]]) -> Recorded:
    return {tuple(p): p + out for p, out in zip(prompts(len(wanted)), wanted)}


def rows() -> list[tuple[str, str, int, str]]:
    """Each drafter in each situation, with batches and settings in turn."""
    found = []
    for first, name in enumerate(DRAFTERS):
        for second, situation in enumerate(SITUATIONS):
            batch = 3 if "preempted" in situation else BATCHES[(first + second) % 2]
            found.append((name, situation, batch, list(SETTINGS)[(first + second) % 3]))
    return found


@pytest.mark.parametrize("name, situation, batch, setting", rows())
def test_a_drafter_changes_no_token_of_a_deepseek_model(name: str, situation: str, batch: int, setting: str) -> None:
    wanted = plain(batch, setting)
    llm = deepseek_llm(DRAFTERS[name](recorded(wanted)), **SITUATIONS[situation])
    assert tokens_of(llm, batch, setting) == wanted
    if "preempted" in situation:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "naive"])
@pytest.mark.parametrize("name, batch, setting", [("ngram", 1, "greedy"), ("replay_tree", 3, "seeded")])
def test_a_prefix_hit_changes_no_token(name: str, batch: int, setting: str, absorbed: bool, kernels: str) -> None:
    options: dict[str, Any] = {"kernels": kernels, "mla_use_matrix_absorption": absorbed}
    wanted = tokens_of(deepseek_llm(**options), batch, setting)
    llm = deepseek_llm(DRAFTERS[name](recorded(wanted)), block_size=4, **options)
    assert tokens_of(llm, batch, setting) == wanted
    again = [output.outputs[0] for output in llm.generate(prompts(batch), SETTINGS[setting])]
    assert all(output.stats.prefix_hit for output in again), "a test of prefix hits needs some"
    assert [output.token_ids for output in again] == wanted


def native_rows() -> list[tuple[str, str, int, str, dict[str, Any]]]:
    places = list(SITUATIONS.values())
    return [
        (how, name, BATCHES[(first + second) % 2], list(SETTINGS)[(first + second) % 3], places[(first + second) % 7])
        for first, how in enumerate(NATIVE)
        for second, name in enumerate(DRAFTERS)
    ]


@pytest.mark.parametrize("how, name, batch, setting, situation", native_rows())
def test_a_drafter_changes_no_token_on_the_native_kernels(
    how: str, name: str, batch: int, setting: str, situation: dict[str, Any]
) -> None:
    wanted = plain(batch, setting, how)
    drafter = DRAFTERS[name](recorded(wanted))
    llm = deepseek_llm(drafter, kernels="native", packable=True, **NATIVE[how], **situation)
    assert tokens_of(llm, batch, setting) == wanted


@pytest.mark.parametrize("drafter", [NGram(5, min_match=1), EarlyExit(3, layers=1)], ids=["ngram", "early_exit"])
def test_rounds_on_the_torch_kernels_wait_for_nothing(drafter: Any) -> None:
    """On a device that has shapes and no data, so that any read would raise."""
    launch(on_nothing(drafter, target=model("experts_yarn")), "seeded")


def test_replay_accepts_every_length_and_every_branch(record_property: Callable[[str, object], None]) -> None:
    """Else equality would prove little."""
    wanted = plain(3, "greedy", "floats")
    replay = Replay(recorded(wanted), seed=0, trees=True)
    llm = deepseek_llm(replay, kernels="native", packable=True)
    for seed in range(8):
        replay.seed = seed
        assert tokens_of(llm, 3, "greedy") == wanted
    lengths, branches = (dict(sorted(c.items())) for c in (replay.histogram.lengths, replay.histogram.branches))
    record_property("shown", f"deepseek, replay: accepted {lengths}, branches {branches}")
    assert set(lengths) >= set(range(Replay.max_depth + 1)) and set(branches) == set(range(Replay.max_siblings))
