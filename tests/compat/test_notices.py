"""What is said of a foreign spelling that changes nothing, and when a generation config samples."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, DraftModel, Medusa, NGram, Suffix
from paceline.compat import Notices, read_request, translate
from tests.compat.probe import KNOWN, PROMPT, shown
from tests.fakes import tiny_llm, tiny_model

INAPPLICABLE = [
    ({"speculative_model": "d", "ngram_prompt_lookup_max": 4}, DraftModel("d"), ["ngram_prompt_lookup_max=4"]),
    (
        {"speculate_method": "inference_with_reference", "draft_model_name_or_path": "d"},
        NGram(rule="reference"),
        ["draft_model_name_or_path='d'"],
    ),
    (
        {"speculative_config": {"method": "suffix", "prompt_lookup_max": 3, "use_heterogeneous_vocab": True}},
        Suffix(),
        ["speculative_config.prompt_lookup_max=3", "speculative_config.use_heterogeneous_vocab=True"],
    ),
    (
        {"speculative_config": {"method": "medusa", "model": "d", "parallel_drafting": True}},
        Medusa("d"),
        ["speculative_config.parallel_drafting=True"],
    ),
    ({"speculate_method": "None", "speculate_max_draft_token_num": 3}, None, ["speculate_max_draft_token_num=3"]),
    ({"drafter": "suffix", "ngram_prompt_lookup_max": 3}, Suffix(), ["ngram_prompt_lookup_max=3"]),
    ({"drafter": "none", "ngram_prompt_lookup_max": 3}, "none", ["ngram_prompt_lookup_max=3"]),
    ({"drafter": Suffix(4), "ngram_prompt_lookup_max": 3}, Suffix(4), ["ngram_prompt_lookup_max=3"]),
    (
        {"drafter": "ngram", "speculative_model_quantization": "int8"},
        NGram(),
        ["speculative_model_quantization='int8'"],
    ),
]


@pytest.mark.parametrize("given, expected, named", INAPPLICABLE, ids=lambda value: shown(value, 50))
def test_an_option_that_the_drafter_does_not_have_is_left_out_with_a_notice(
    given: dict[str, Any], expected: Any, named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        assert translate(given, KNOWN)["drafter"] == expected
    notices = [record.getMessage() for record in caplog.records]
    assert [notice.split()[0] for notice in notices] == named
    assert all("does not apply to" in notice and "left out" in notice for notice in notices)


def test_a_notice_is_given_once_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm(verbose=True)
    with caplog.at_level(logging.WARNING, "paceline"):
        for length in (7, 8):
            llm.generate([PROMPT, PROMPT], max_length=length, pad_token_id=0, seed=1)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "verbose=True",
        "max_length",
        "pad_token_id=0",
    ]


def test_a_temperature_beside_do_sample_false_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        assert read_request({"do_sample": False, "temperature": 0.7}, 4, Notices()) == {"temperature": 0.0}
        assert read_request({"do_sample": True, "temperature": 0.7}, 4, Notices()) == {"temperature": 0.7}
    (record,) = caplog.records
    assert "temperature has no effect without do_sample=True" in record.getMessage()


GREEDY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"generation_config": transformers.GenerationConfig(max_new_tokens=8)}, {"max_tokens": 8, "temperature": 0.0}),
    ({"generation_config": {"max_new_tokens": 8}}, {"max_tokens": 8, "temperature": 0.0}),
    ({"generation_config": {"max_new_tokens": 8, "do_sample": None}}, {"max_tokens": 8, "temperature": 0.0}),
    ({"generation_config": transformers.GenerationConfig()}, {"temperature": 0.0}),
    ({"generation_config": transformers.GenerationConfig(do_sample=True)}, {}),
    ({"generation_config": {"do_sample": True, "temperature": 0.7}}, {"temperature": 0.7}),
    ({"generation_config": {"max_new_tokens": 8}, "do_sample": True}, {"max_tokens": 8}),
    ({"generation_config": None, "max_new_tokens": 8}, {"max_tokens": 8}),
]


@pytest.mark.parametrize("given, expected", GREEDY, ids=lambda value: shown(value, 60))
def test_a_generation_config_samples_only_if_it_says_so(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_request(given, 4, Notices()) == expected


def test_a_temperature_in_a_generation_config_that_does_not_sample_is_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert read_request({"generation_config": {"temperature": 0.7}}, 4, Notices()) == {"temperature": 0.0}
    (record,) = caplog.records
    assert record.getMessage().startswith("temperature has no effect without do_sample=True")


def test_a_generation_config_means_what_transformers_makes_of_it() -> None:
    model = tiny_model()
    given = transformers.GenerationConfig(max_new_tokens=8, pad_token_id=0)
    theirs = model.generate(torch.tensor([PROMPT]), generation_config=given)[0, len(PROMPT) :].tolist()
    ours = LLM(model, kernels="reference", max_model_len=64).generate(
        [PROMPT], generation_config=given, ignore_eos=True
    )
    assert ours[0].outputs[0].token_ids == theirs
