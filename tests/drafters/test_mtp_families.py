"""GLM-4.5 and DeepSeek-V3, target and modules end to end: drafts are those of transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, MTP, SamplingParams
from paceline.testing import prompts
from tests.drafters.equations import Spy
from tests.drafters.mtp_models import (
    KINDS,
    copies_of,
    drafts_of,
    features_of,
    hand_of,
    model_of,
    write_apart,
    write_whole,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run(target: Any, drafter: Any, **options: Any) -> list[list[int]]:
    given = {"kernels": "torch", "max_model_len": 100, "device": "cpu", **options}
    return [output.outputs[0].token_ids for output in LLM(target, drafter, **given).generate(prompts(3), GREEDY)]


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_module_in_turn_drafts_what_transformers_modules_draft(
    kind: str, count: int, kernels: str, tmp_path: Path
) -> None:
    spy = Spy(MTP())
    folder = write_whole(tmp_path, kind, count)
    assert run(folder, spy, kernels=kernels) == run(folder, None, kernels=kernels)
    assert len(spy.seen) > 6 and max(len(tokens) for _, _, tokens, _ in spy.seen) == count
    for text, _, tokens, _ in spy.seen:
        assert tokens == drafts_of(kind, text, count)[: len(tokens)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_begin_again_where_there_are_fewer_than_drafts(kind: str, count: int, tmp_path: Path) -> None:
    """Apart from their target, too."""
    spy, by_hand = Spy(MTP(write_apart(tmp_path, kind, count), 4)), hand_of(kind, count)
    run(model_of(kind), spy)
    assert len(spy.seen) > 6
    for text, _, tokens, _ in spy.seen:
        wanted = by_hand.drafts(text, features_of(kind, text), 4)
        assert tokens == wanted[: len(tokens)]
        assert wanted[:count] == drafts_of(kind, text, count), "the equations say what transformers says"


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_the_targets_matrices_are_held_once_and_need_not_be_there(kind: str, tmp_path: Path) -> None:
    seen = []
    for copies in (False, True):
        spy = Spy(MTP(write_apart(tmp_path / str(copies), kind, 1, copies), 3))
        given: dict[str, Any] = {"kernels": "torch", "max_model_len": 100, "device": "cpu"}
        llm = LLM(model_of(kind), spy, **given)
        llm.generate(prompts(3), GREEDY)
        (module,), target = spy.made.modules, llm.engine.target.model
        assert module.embedding is target.embedding and module.head is target.head
        seen.append(spy.seen)
    assert seen[0] == seen[1] and set(copies_of(kind)) == {"embed_tokens.weight", "shared_head.head.weight"}
