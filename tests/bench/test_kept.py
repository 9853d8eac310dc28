"""A draft model that stays loaded drafts as one that was loaded anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, MTP, DraftModel, NGram, SamplingParams
from paceline.bench import kept
from paceline.drafters import mtp
from paceline.models import loader
from paceline.testing import tiny_llm
from tests.cli.checkpoints import make_model
from tests.drafters.tiny_mtp import tiny_mtp, write_mimo

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 9, 10, 9]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(97)


def make_llm(model: Any) -> LLM:
    return LLM(model, kernels="reference", max_model_len=200, max_num_seqs=2, prefix_caching=False)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every model that is read."""
    seen: list[Any] = []
    real = loader.build
    monkeypatch.setattr(loader, "build", lambda *given, **named: (seen.append(given[0]), real(*given, **named))[1])
    return seen


def run(llm: LLM, drafter: Any) -> list[Any]:
    llm.set_drafter(drafter)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    return [(output.token_ids, output.provenance, output.stats.proposed, output.stats.accepted) for output in outputs]


def test_one_set_of_weights_serves_all_lengths_and_drafts_the_same(model: Any, loads: list[Any]) -> None:
    lengths = [1, 4, 2, 4]
    configs = [DraftModel(model, length) for length in lengths]
    fresh = [run(make_llm(model), config) for config in configs]
    llm = make_llm(model)
    loads.clear()
    shared = kept.keep_loaded([None, NGram(), *configs])
    assert shared[:2] == [None, NGram()]
    for drafter, expected, length in zip(shared[2:], fresh, lengths):
        assert run(llm, drafter) == expected
        assert run(llm, None)  # plain decoding in between, as in a measurement
        assert [len(proposed) for _, _, proposed, _ in expected] == [length, length]
    assert len(loads) == 1


def test_two_different_draft_models_are_not_both_kept(model: Any) -> None:
    configs = [DraftModel("one", 3), DraftModel("two", 3)]
    assert kept.keep_loaded(configs) == configs
    assert kept.keep_loaded([None, NGram()]) == [None, NGram()]


def test_a_length_that_files_say_is_the_drafters_own() -> None:
    folder = tiny_mtp("deepseek", 2)
    [drafter] = kept.keep_loaded([MTP(folder)])
    llm = tiny_llm(prefix_caching=False)
    for config in (drafter, None, drafter):
        llm.set_drafter(config)
        llm.generate(PROMPTS, PARAMS)
    assert drafter.max_nodes == 2
    mixed = [MTP(folder), MTP(folder, num_draft_tokens=3)]
    assert kept.keep_loaded(mixed) == mixed


def test_modules_that_lie_with_the_target_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, real = [], mtp.load_modules
    monkeypatch.setattr(mtp, "load_modules", lambda *given: (reads.append(given), real(*given))[1])
    target = write_mimo(tmp_path)
    [drafter] = kept.keep_loaded([MTP()])
    assert kept.has_weights(MTP())
    llm = make_llm(target)
    for config in (drafter, None, drafter):
        llm.set_drafter(config)
        llm.generate(PROMPTS, PARAMS)
    assert len(reads) == 1
