"""Targets with experts under the contract: whatever is proposed, not one token of theirs changes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from paceline import DraftModel, EarlyExit, NGram
from paceline.kernels.experts import Chosen, route
from paceline.testing import BATCHES, SETTINGS, SITUATIONS, check_drafter, prompts, tiny_llm, tokens_of
from tests.fakes import VOCAB, Replay
from tests.native import EXACT, marked
from tests.pairs import missing

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGETS = {
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=11),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1], head_dim=8
    ),
}
DRAFTERS: dict[str, Callable[[str], Any]] = {
    "ngram": lambda name: NGram(5, min_match=1, max_match=3),
    "draft_is_target": lambda name: DraftModel(target(name), 4),
    "early_exit": lambda name: EarlyExit(3, layers=1),
}
KERNELS = ["reference", "native"]


@functools.cache
def target(name: str) -> Any:
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(TARGETS[name]).eval().float()


@functools.cache
def plain(name: str, kernels: str, batch: int, setting: str) -> list[list[int]]:
    return tokens_of(tiny_llm(target=target(name), kernels=kernels), batch, setting)


# Kernels in turn: every pair of target, drafter and kernels. Both targets describe the same words.
ROWS = [
    (name, drafter, KERNELS[(first + second) % 2])
    for first, name in enumerate(TARGETS)
    for second, drafter in enumerate(DRAFTERS)
]


def test_every_pair_is_run() -> None:
    assert not missing(ROWS, (TARGETS, DRAFTERS, KERNELS))


@pytest.mark.parametrize(("name", "drafter", "kernels"), marked(ROWS))
def test_a_drafter_changes_no_token_of_a_target_with_experts(
    name: str, drafter: str, kernels: str, record_property: Callable[[str, object], None]
) -> None:
    checked = check_drafter(lambda: DRAFTERS[drafter](name), kernels, target(name))
    told = f"{checked.runs} runs the same, {checked.accepted} of {checked.proposed} drafts accepted"
    record_property("shown", f"{name}, {drafter}, {kernels}: {told}")
    assert checked.accepted > 0


@pytest.mark.parametrize("kernels", EXACT)
@pytest.mark.parametrize("name, trees", [("mixtral", False), ("qwen3_moe", True)])
def test_replay_changes_no_token_and_accepts_every_length(name: str, trees: bool, kernels: str) -> None:
    """Every situation, with batches and settings in turn."""
    lengths: Counter[int] = Counter()
    for number, situation in enumerate(SITUATIONS):
        batch, setting = BATCHES[1 - number % 2], list(SETTINGS)[number % 3]
        wanted = plain(name, kernels, batch, setting)
        replay = Replay({tuple(p): p + out for p, out in zip(prompts(batch), wanted)}, seed=number, trees=trees)
        llm = tiny_llm(replay, target=target(name), kernels=kernels, **SITUATIONS[situation])
        assert tokens_of(llm, batch, setting) == wanted, situation
        lengths += replay.histogram.lengths
    assert set(lengths) >= set(range(Replay.max_depth + 1))


@pytest.mark.parametrize("name", TARGETS)
def test_all_experts_are_chosen_and_rows_of_a_batch_differ(name: str) -> None:
    """Equality would prove little of experts if all rows went through the same ones."""
    seen = []

    def noting(*given: Any) -> Chosen:
        seen.append(route(*given).ids)
        return route(*given)

    with mock.patch("paceline.kernels.eager.route", noting):
        tokens_of(tiny_llm(target=target(name), kernels="torch"), 3, "seeded")
    config = TARGETS[name]
    assert torch.cat(seen).unique().tolist() == list(range(config.num_local_experts))
    assert sum(len(ids) == 3 and len(ids.unique(dim=0)) > 1 for ids in seen) > 10
