"""vLLM's speculative_config: every method it names becomes its drafter here, and drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.compat import translate
from paceline.drafters.table import KINDS
from paceline.errors import OptionError
from tests.drafters.tiny_eagle import tiny_eagle
from tests.drafters.tiny_medusa import medusa
from tests.drafters.tiny_mlp import mlp
from tests.drafters.tiny_mtp import tiny_mtp, write_mimo
from tests.drafters.tiny_readers import shared, write_pard
from tests.fakes import tiny_llm, tiny_model

PROMPTS = [[5, 17, 42, 5, 17, 42, 5], [9, 9, 9, 9]]
PARALLEL = {"parallel_drafting": True}


def plain_folder(folder: Path) -> str:
    tiny_model(layers=1).save_pretrained(folder)
    return str(folder)


# method, its model, more words, the drafter and the most it drafts, where the words do not say it
METHODS: list[tuple[str, Callable[[Path], str] | None, dict[str, Any], str, int]] = [
    ("ngram", None, {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, "ngram", 5),
    ("suffix", None, {}, "suffix", 16),
    ("draft_model", plain_folder, {}, "draft_model", 5),
    ("draft_model", lambda folder: str(write_pard(folder)), PARALLEL, "pard", 8),
    ("medusa", lambda folder: medusa("vllm")[0], {}, "medusa", 3),
    ("mlp_speculator", lambda folder: mlp()[0], {}, "mlp_speculator", 3),
    ("eagle", lambda folder: tiny_eagle("first"), {}, "eagle", 5),
    ("eagle3", lambda folder: tiny_eagle("third"), {}, "eagle", 5),
    ("eagle3", lambda folder: tiny_eagle("parallel"), PARALLEL, "eagle", 5),
    ("peagle", lambda folder: tiny_eagle("parallel"), {}, "eagle", 5),
    ("dflash", lambda folder: shared("dflash"), {}, "dflash", 3),
    ("dflash", lambda folder: shared("dflash"), PARALLEL, "dflash", 3),
    ("mtp", lambda folder: tiny_mtp("mimo"), {}, "mtp", 1),
    ("deepseek_mtp", lambda folder: tiny_mtp("deepseek", 2), {}, "mtp", 2),
    ("mimo_mtp", lambda folder: tiny_mtp("mimo"), {}, "mtp", 1),
    ("glm4_moe_mtp", lambda folder: tiny_mtp("deepseek"), {}, "mtp", 1),
]


@pytest.mark.parametrize(("method", "make", "more", "name", "most"), METHODS, ids=lambda value: str(value)[:20])
def test_a_method_drafts(
    method: str, make: Callable[[Path], str] | None, more: dict[str, Any], name: str, most: int, tmp_path: Path
) -> None:
    given = {"method": method, **({"model": make(tmp_path / "drafter")} if make else {}), **more}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = [out.outputs[0].token_ids for out in tiny_llm().generate(PROMPTS, params)]
    for tokens in (None, 2):
        words = given if tokens is None else {**given, "num_speculative_tokens": tokens}
        llm = LLM(tiny_model(), kernels="reference", max_model_len=64, speculative_config=words)
        drafter = llm.engine.drafter
        assert drafter is not None and (drafter.name, drafter.max_nodes) == (name, tokens or most)
        answers = [out.outputs[0] for out in llm.generate(PROMPTS, params)]
        assert [answer.token_ids for answer in answers] == plain
        assert sum(sum(answer.stats.proposed) for answer in answers) > 0


@pytest.mark.parametrize("method", ["mtp", "mimo_mtp"])
def test_a_target_that_brings_its_own_modules_needs_no_other_model(method: str, tmp_path: Path) -> None:
    words = {"method": method, "num_speculative_tokens": 2}
    llm = LLM(write_mimo(tmp_path), kernels="reference", max_model_len=64, speculative_config=words)
    drafter = llm.engine.drafter
    assert drafter is not None and (drafter.name, drafter.max_nodes) == ("mtp", 2)


def test_every_method_of_a_drafter_that_loads_is_shown() -> None:
    assert {method for kind in KINDS if kind.loads for method in kind.methods} == {row[0] for row in METHODS}


def test_parallel_drafting_is_told_to_be_nothing_to_a_drafter_without_a_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        translate({"speculative_config": {"method": "ngram", **PARALLEL}}, ["drafter"])
    assert "speculative_config.parallel_drafting=True does not apply to n-gram drafting" in caplog.text
    with pytest.raises(OptionError, match="parallel_drafting='maybe' is not allowed; allowed: true or false"):
        translate({"speculative_config": {"model": "d", "parallel_drafting": "maybe"}}, ["drafter"])
