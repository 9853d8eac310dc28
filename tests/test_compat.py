"""Other systems' spellings, old and new, become our words; conflicts and unknown names are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline import DraftModel, NGram, Suffix
from paceline.compat import RENAMED, WITHOUT_EFFECT, from_speculative_config, translate
from paceline.errors import OptionError
from tests.fakes import tiny_llm, tiny_model

KNOWN = ["drafter", "prefix_caching", "num_pages", "max_batched_tokens", "dtype", "max_model_len"]


def drafter_of(**options: Any) -> Any:
    return translate(options, KNOWN).get("drafter")


OLD: list[tuple[dict[str, Any], Any]] = [
    ({"speculative_model": "some/draft"}, DraftModel("some/draft", 5)),
    ({"speculative_model": "some/draft", "num_speculative_tokens": 3}, DraftModel("some/draft", 3)),
    (
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3},
        NGram(4, min_match=1, max_match=3),
    ),
    (
        {"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 4, "ngram_prompt_lookup_min": 2},
        NGram(5, min_match=2, max_match=4),
    ),
    ({"speculative_model": "some/draft", "speculative_draft_tensor_parallel_size": 1}, DraftModel("some/draft", 5)),
    ({"speculative_model": None, "num_speculative_tokens": None}, None),
]
NEW: list[tuple[dict[str, Any], Any]] = [
    ({"model": "some/draft"}, DraftModel("some/draft", 5)),
    ({"model": "some/draft", "num_speculative_tokens": 2}, DraftModel("some/draft", 2)),
    ({"method": "draft_model", "model": "d", "use_heterogeneous_vocab": True}, DraftModel("d", cross_vocabulary=True)),
    ({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}, NGram(6, max_match=4)),
    ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}, NGram(5, min_match=2, max_match=4)),
    ({"model": "ngram"}, NGram(5)),
    ({"model": "[ngram]", "num_speculative_tokens": 1}, NGram(1)),
    ({"method": "suffix"}, Suffix()),
    (
        {
            "method": "suffix",
            "num_speculative_tokens": 7,
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 50,
            "suffix_decoding_max_spec_factor": 2.0,
            "suffix_decoding_min_token_prob": 0.3,
        },
        Suffix(7, max_tree_depth=12, max_cached_requests=50, max_spec_factor=2.0, min_token_prob=0.3),
    ),
    ({"model": "d", "draft_tensor_parallel_size": 1}, DraftModel("d")),
]


@pytest.mark.parametrize("given, expected", OLD, ids=lambda value: str(value)[:60])
def test_the_old_spelling_makes_the_same_drafter(given: dict[str, Any], expected: Any) -> None:
    assert drafter_of(**given) == expected


@pytest.mark.parametrize("given, expected", NEW, ids=lambda value: str(value)[:60])
def test_the_new_spelling_makes_the_same_drafter(given: dict[str, Any], expected: Any) -> None:
    assert drafter_of(speculative_config=given) == expected == from_speculative_config(given)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"speculative_config": {"method": "ngram"}, "speculative_model": "d"},
        ("speculative_config", "speculative_model", "both"),
    ),
    ({"speculative_config": {"method": "ngram"}, "drafter": "suffix"}, ("drafter=", "give one")),
    ({"speculative_model": "d", "drafter": "suffix"}, ("drafter=", "give one")),
    ({"num_speculative_tokens": 3}, ("num_speculative_tokens", "speculative_model")),
    ({"speculative_model": "[ngram]"}, ("'[ngram]'", "ngram_prompt_lookup_max")),
    ({"speculative_model": "d", "num_speculative_tokens": 0}, ("num_draft_tokens=0", "1 or more")),
    ({"speculative_model": "d", "speculative_draft_tensor_parallel_size": 2}, ("tensor_parallel_size=2", "allowed: 1")),
    ({"speculative_config": {"model": "d", "draft_tensor_parallel_size": 4}}, ("tensor_parallel_size=4", "allowed: 1")),
    ({"speculative_config": {}}, ("'model'", "'method'")),
    ({"speculative_config": "ngram"}, ("'ngram'", "dictionary")),
    ({"speculative_config": {"method": "eagle9", "model": "d"}}, ("'eagle9'", "ngram, suffix, draft_model")),
    ({"speculative_config": {"num_spec_tokens": 3}}, ("'num_spec_tokens'", "'num_speculative_tokens'")),
    ({"speculative_config": {"zzzz": 3}}, ("'zzzz'", "known:", "prompt_lookup_max")),
    (
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}},
        ("min_match is 4", "max_match is 2"),
    ),
    ({"speculativ_model": "d"}, ("'speculativ_model'", "'speculative_model'")),
    ({"enable_prefix_cachin": True}, ("'enable_prefix_cachin'", "'enable_prefix_caching'")),
    ({"zzzz": 1}, ("'zzzz'", "known:", "max_model_len")),
]


@pytest.mark.parametrize("given, named", REFUSED, ids=lambda value: str(value)[:60])
def test_conflicts_and_unknown_names_are_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        translate(given, KNOWN)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_no_draft_tokens_at_all_is_refused_in_the_new_spelling_too(method: str) -> None:
    with pytest.raises(OptionError, match="0"):
        from_speculative_config({"method": method, "model": "d", "num_speculative_tokens": 0})


@pytest.mark.parametrize("theirs", RENAMED)
def test_a_renamed_option_keeps_its_value(theirs: str) -> None:
    value = object()
    assert translate({theirs: value}, KNOWN) == {RENAMED[theirs]: value}


def test_an_option_given_in_both_spellings_is_refused() -> None:
    with pytest.raises(OptionError, match="enable_prefix_caching"):
        translate({"prefix_caching": True, "enable_prefix_caching": False}, KNOWN)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_option_without_effect_is_taken_with_a_notice(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        assert translate({name: 3}, KNOWN) == {}
    (record,) = caplog.records
    assert name in record.getMessage() and "no effect" in record.getMessage()


def test_lookup_lengths_beside_a_draft_model_are_left_out_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        made = drafter_of(speculative_model="d", ngram_prompt_lookup_max=4, ngram_prompt_lookup_min=1)
    assert made == DraftModel("d", 5)
    notices = [record.getMessage() for record in caplog.records]
    assert [notice.split()[0] for notice in notices] == ["ngram_prompt_lookup_max", "ngram_prompt_lookup_min"]


def test_our_own_options_pass_untouched() -> None:
    given = {"dtype": "float32", "drafter": "ngram", "prefix_caching": False}
    assert translate(given, KNOWN) == given
    assert translate({"drafter": None}, KNOWN) == {"drafter": None}


def test_an_engine_understands_foreign_spellings(caplog: pytest.LogCaptureFixture) -> None:
    config = {"model": tiny_model(layers=1), "num_speculative_tokens": 2}
    with caplog.at_level(logging.WARNING, "paceline"):
        llm = tiny_llm(
            speculative_config=config,
            enable_prefix_caching=False,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=20,
            enforce_eager=True,
        )
    assert llm.engine.drafter is not None and (llm.engine.drafter.name, llm.engine.drafter.max_nodes) == (
        "draft_model",
        2,
    )
    scheduler = llm.engine.scheduler
    assert (scheduler.prefix_caching, scheduler.max_batched_tokens, scheduler.pool.num_pages) == (False, 32, 20)
    assert "enforce_eager" in caplog.text
