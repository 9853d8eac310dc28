"""Options, requests and flags that cannot be meant are refused, each with one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import FirstOf, NGram
from paceline.compat import Notices, read_request, translate
from paceline.errors import OptionError
from tests.compat.probe import KNOWN, shown, type_in
from tests.fakes import Hopeless

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"speculative_config": {"method": "ngram"}, "speculative_model": "d"},
        ("speculative_config", "speculative_model", "both"),
    ),
    ({"speculative_config": {"method": "ngram"}, "gamma": 3}, ("speculative_config", "gamma", "both")),
    ({"speculative_config": {"method": "ngram"}, "drafter": "suffix"}, ("drafter=", "give one")),
    ({"speculative_model": "d", "drafter": "suffix"}, ("drafter=", "give one")),
    ({"num_speculative_tokens": 3}, ("num_speculative_tokens=3", "speculative_model")),
    ({"speculate_max_ngram_size": 3}, ("speculate_max_ngram_size=3", "needs a drafter")),
    ({"drafter": NGram(2), "gamma": 3}, ("gamma=3", "NGram", "its own")),
    ({"drafter": NGram(2), "ngram_prompt_lookup_max": 3}, ("ngram_prompt_lookup_max=3", "NGram", "its own")),
    ({"drafter": FirstOf("ngram", "suffix"), "ngram_prompt_lookup_max": 3}, ("FirstOf", "its own")),
    ({"drafter": Hopeless({}, 3), "ngram_prompt_lookup_max": 3}, ("Hopeless", "its own")),
    ({"drafter": "ngran", "ngram_prompt_lookup_max": 3}, ("'ngran'", "did you mean 'ngram'?")),
    ({"drafter": "ngram", "speculate_method": "draft_model"}, ("speculate_method", "needs a model, too")),
    ({"speculative_model": "[ngram]"}, ("'[ngram]'", "ngram_prompt_lookup_max")),
    ({"speculative_model": "d", "num_speculative_tokens": 0}, ("num_draft_tokens=0", "1 or more")),
    ({"speculative_config": {"method": "suffix", "num_speculative_tokens": 0}}, ("0", "1 or more")),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, ("0", "1 or more")),
    ({"speculative_config": {}}, ("'model'", "'method'")),
    ({"speculative_config": {"method": "draft_model"}}, ("draft_model", "needs a model, too")),
    ({"speculate_method": "draft_model"}, ("speculate_method", "needs a model, too")),
    ({"speculative_config": "ngram"}, ("'ngram'", "dictionary")),
    ({"speculative_config": 5}, ("speculative_config=5", "dictionary")),
    ({"speculative_config": {"method": "eagle9", "model": "d"}}, ("'eagle9'", "ngram, suffix, draft_model")),
    ({"speculative_config": {"num_spec_tokens": 3}}, ("'num_spec_tokens'", "'num_speculative_tokens'")),
    ({"speculative_config": {"zzzz": 3}}, ("'zzzz'", "known:", "prompt_lookup_max")),
    (
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}},
        ("min_match=4", "max_match=2"),
    ),
    ({"speculate_method": "magic"}, ("speculate_method='magic'", "inference_with_reference")),
    ({"quant_type": "int3"}, ("quant_type='int3'", "weight_only_int8")),
    ({"gpu": "0,1"}, ("gpu='0,1'", "a whole number")),
    ({"model": "a", "model_name_or_path": "b"}, ("model='a'", "model_name_or_path='b'", "contradict")),
    ({"draft_model": "a", "speculative_model": "[ngram]"}, ("draft_model='a'", "speculative_model=", "contradict")),
    ({"draft_model": "a", "gamma": 2, "n_spec_tokens": 3}, ("gamma=2", "n_spec_tokens=3", "contradict")),
    ({"prefix_caching": True, "enable_prefix_caching": False}, ("prefix_caching=True", "enable_prefix_caching=False")),
    ({"max_batch_size": 2, "batch_size": 3}, ("max_batch_size=2", "batch_size=3", "contradict")),
    ({"max_input_len": 8, "max_output_len": 8, "max_model_len": 20}, ("max_model_len=20", "= 16", "contradict")),
    ({"max_input_len": "x", "max_output_len": 8}, ("max_input_len='x'", "a whole number")),
    ({"max_length": 20}, ("max_length=20", "belongs to a request")),
    ({"temperature": 0.5}, ("temperature", "belongs to a request")),
    ({"speculativ_model": "d"}, ("'speculativ_model'", "'speculative_model'")),
    ({"enable_prefix_cachin": True}, ("'enable_prefix_cachin'", "'enable_prefix_caching'")),
    ({"max_input_length": 5}, ("'max_input_length'", "'max_input_len'")),
    ({"zzzz": 1}, ("'zzzz'", "known:", "max_model_len")),
]
REFUSED_REQUESTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"max_length": 10}, ("max_length=10", "10 tokens", "max_new_tokens")),
    ({"max_length": 30, "max_new_tokens": 5}, ("max_new_tokens=5", "max_length=30", "contradict")),
    ({"max_tokens": 4, "max_new_tokens": 5}, ("max_tokens=4", "max_new_tokens=5", "contradict")),
    ({"max_length": "long"}, ("max_length='long'", "a whole number")),
    ({"do_sample": "maybe"}, ("do_sample='maybe'", "true or false")),
    ({"eos_token_id": "x"}, ("eos_token_id='x'", "a whole number")),
    ({"num_beams": True}, ("num_beams=True", "a whole number")),
    ({"generation_config": {"typical_p": 0.9}}, ("'typical_p'",)),
    ({"generation_config": 5}, ("generation_config=5", "dictionary")),
    ({"gamma": 5}, ("gamma", "engine", "LLM(…)")),
    ({"max_batch_size": 5}, ("max_batch_size", "engine", "LLM(…)")),
    ({"max_new_token": 5}, ("'max_new_token'", "'max_new_tokens'")),
]
REFUSED_FLAGS = [
    ("--gamma 5 --num-draft-tokens 3 --drafter suffix", ("--gamma 5", "--num-draft-tokens 3", "contradict")),
    ("--gamma 5 --n_spec_tokens 3 --draft_model d", ("--gamma 5", "--n_spec_tokens 3", "contradict")),
    ("--drafter ngram --draft_model d", ("--drafter", "--draft_model d", "both")),
    ("--max_new_tokens 5 --max-tokens 6", ("--max_new_tokens 5", "--max-tokens 6", "contradict")),
    ("--max_tokens 5 --max-tokens 6", ("--max_tokens 5", "--max-tokens 6", "contradict")),
    ("--do_sample false --temperature 0.7", ("--do_sample false", "--temperature 0.7", "contradict")),
    ("--gpu 0 --device cpu", ("--gpu 0", "--device cpu", "contradict")),
    ("--gamma", ("--gamma needs a value",)),
    ("--user_input", ("--user_input needs a value",)),
    ("-tp", ("-tp needs a value",)),
    ("-pp 2", ("-pp 2", "one device")),
    ("--speculative-config {method:ngram}", ("--speculative-config {method:ngram}", "JSON")),
    ("--quant-type a8w8", ("--quant-type a8w8", "weight_only_int8")),
    ("--gamm 5", ("'--gamm'", "'--gamma'")),
    ("--max-token 5", ("'--max-token'", "'--max-tokens'")),
    ("--zzzz 5", ("'--zzzz'", "see probe --help")),
    ("--generation-config 5", ("'--generation-config'", "not known")),
]


@pytest.mark.parametrize("given, named", REFUSED, ids=lambda value: shown(value, 60))
def test_options_that_cannot_be_meant_are_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        translate(given, KNOWN)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize("given, named", REFUSED_REQUESTS, ids=lambda value: shown(value, 60))
def test_requests_that_cannot_be_meant_are_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        read_request(given, 10, Notices())
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize("typed, named", REFUSED_FLAGS, ids=lambda value: shown(value, 60))
def test_flags_that_cannot_be_meant_are_refused(typed: str, named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        type_in(typed)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in named), str(caught.value)
