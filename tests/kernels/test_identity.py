"""End to end on real models with the native kernels: with any drafter, not one token differs from plain decoding."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from paceline import LLM, DraftModel, FirstOf, NGram, SamplingParams, Suffix
from paceline.models import catalog
from tests import fakes
from tests.fakes import Recorded, Replay

PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "List of planets in order from the sun: Mercury,",
    "One two three four five six seven eight nine ten. One two three four",
]
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 1234},
}
DRAFTERS: dict[str, Any] = {
    "ngram": lambda recorded: NGram(5, 1, 3),
    "suffix": lambda recorded: Suffix(),
    "suffix_tree": lambda recorded: Suffix(tree=True),
    "first_of": lambda recorded: FirstOf(Suffix(), NGram(5, 1, 3)),
    "draft_model": lambda recorded: DraftModel(small(), 3, cross_vocabulary=True),
    "replay_tree": lambda recorded: Replay(recorded, seed=4, trees=True),
}


def small() -> str:
    return str(catalog.ensure(catalog.DEFAULT_MODEL, progress=False))


@functools.cache
def default_llm() -> LLM:
    return LLM(small(), max_model_len=256, kernels="native")


def generated(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[list[Any], int]:
    """Outputs, and how many drafted tokens were accepted."""
    outputs = llm.generate(prompts, params)
    accepted = sum(place.kind == "accepted" for output in outputs for place in output.outputs[0].provenance)
    return outputs, accepted


def compare(llm: LLM, prompts: list[str], params: SamplingParams, drafters: list[str]) -> str:
    """Every drafter against plain decoding; answers what was seen."""
    assert llm.model.ops.name == "native"
    llm.set_drafter(None)
    plain, _ = generated(llm, prompts, params)
    recorded: Recorded = {
        tuple(output.prompt_token_ids): output.prompt_token_ids + output.outputs[0].token_ids for output in plain
    }
    same, told = 0, []
    for name in drafters:
        drafter = DRAFTERS[name](recorded)
        llm.set_drafter(drafter)
        outputs, accepted = generated(llm, prompts, params)
        for output, wanted in zip(outputs, plain, strict=True):
            assert output.outputs[0].token_ids == wanted.outputs[0].token_ids, (name, output.prompt)
            assert output.outputs[0].text == wanted.outputs[0].text
            same += 1
        assert accepted > 0, f"{name} had nothing accepted: equality proves nothing"
        told.append(f"{name} {accepted}")
        if name == "replay_tree":
            assert set(drafter.histogram.lengths) == {0, 1, 2, 3, 4}
            assert set(drafter.histogram.branches) == {0, 1, 2}
    return f"{same} of {len(drafters) * len(prompts)} texts identical; accepted: {', '.join(told)}"


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_default_model_says_the_same_with_every_drafter(
    sampling: str, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "VOCAB", 4000)  # where replay takes its wrong tokens from
    llm = default_llm()
    params = SamplingParams(max_tokens=24, ignore_eos=True, **SAMPLING[sampling])
    seen = compare(llm, PROMPTS, params, list(DRAFTERS))
    record_property("shown", f"native kernels, {catalog.DEFAULT_MODEL}, {sampling}: {seen}")


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_larger_model_says_the_same_with_every_drafter(
    sampling: str, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qwen2.5-coder-1.5b"
    path = catalog.cached_path(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache, and 1.1 GB are not fetched for a test")
    monkeypatch.setattr(fakes, "VOCAB", 4000)
    llm = LLM(str(path), max_model_len=128, kernels="native")
    params = SamplingParams(max_tokens=24, ignore_eos=True, **SAMPLING[sampling])
    seen = compare(llm, PROMPTS[:2], params, list(DRAFTERS))
    record_property("shown", f"native kernels, {name}, {sampling}: {seen}")
