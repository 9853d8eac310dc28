"""Sampling parameters: what is refused, and that the refusal is one sentence that names the field."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest

from paceline.errors import OptionError, nearest
from paceline.params import MAX_LOGPROBS, SamplingParams

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
COUNTS = ["top_k", "min_tokens", "max_tokens", "n", "seed", "logprobs", "prompt_logprobs", "max_draft_tokens"]
LISTS = ["stop_token_ids", "allowed_token_ids", "bad_words", "stop"]
SWITCHES = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"]

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("presence_penalty", -2.01),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -3),
    ("frequency_penalty", 3),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("top_k", -2),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("n", 0),
    ("n", -3),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("max_draft_tokens", -1),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("stop_token_ids", [3, -1]),
    ("stop", ""),
    ("stop", ["fine", ""]),
    ("bad_words", [""]),
    ("bad_words", [[]]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: -math.inf}),
]

WRONG_TYPE: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in ("1.0", None, [1.0], 1j, True, False)),
    *((name, value) for name in COUNTS for value in ("1", 1.0, [1], True, math.nan)),
    *((name, None) for name in ("top_k", "min_tokens", "n")),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "12"),
    ("allowed_token_ids", [1, "2"]),
    ("allowed_token_ids", [None]),
    ("stop", [3]),
    ("stop", ["fine", None]),
    ("bad_words", "word"),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1.0: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: True}),
]

# Wrong types that slip through or raise something else than an OptionError.
WRONG_TYPES: list[tuple[str, Any]] = [
    *((name, 5) for name in LISTS),
    *((name, value) for name in SWITCHES for value in ("yes", 1, None)),
    ("bad_words", [5]),
    ("bad_words", [["a"]]),
    ("bad_words", [[1.5]]),
    ("bad_words", [[True]]),
    ("logit_bias", {1: "2"}),
    ("logit_bias", {1: None}),
    ("logit_bias", [1, 2]),
    ("logit_bias", 5),
    ("logits_processors", len),
    ("logits_processors", [5]),
    ("logits_processors", [lambda logits: logits]),
    ("logits_processors", [lambda a, b, c, d: a]),
    ("logits_processors", [dict]),
    ("temperature", 10**400),
]

# Allowed values that do not fit the float32 they are computed in.
TOO_LARGE: list[tuple[str, Any]] = [
    ("temperature", 1e39),
    ("repetition_penalty", 1e39),
    ("repetition_penalty", 1e-50),
    ("logit_bias", {1: 1e39}),
]


def assert_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    said = str(caught.value)
    assert name in said, said
    assert "\n" not in said and ". " not in said and not said.endswith("."), f"not one sentence: {said}"
    assert "allow" in said, f"does not say what is allowed: {said}"


@pytest.mark.parametrize("name, value", OUT_OF_RANGE, ids=str)
def test_a_value_out_of_range_is_refused_in_a_sentence_naming_the_field(name: str, value: Any) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("name, value", WRONG_TYPE, ids=str)
def test_a_value_of_the_wrong_type_is_refused_in_a_sentence_naming_the_field(name: str, value: Any) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("name, value", WRONG_TYPES, ids=lambda value: repr(value).partition(" at 0x")[0][:30])
def test_these_wrong_types_are_refused_in_a_sentence_too(name: str, value: Any) -> None:
    assert_refused(name, value)


@pytest.mark.parametrize("name, value", TOO_LARGE, ids=str)
def test_numbers_beyond_float32_are_refused(name: str, value: Any) -> None:
    assert_refused(name, value)


def test_fewer_max_tokens_than_min_tokens_are_refused_naming_both() -> None:
    with pytest.raises(OptionError, match="min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0),
        ("temperature", 0.0),
        ("temperature", 100),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**6),
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 0.01),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("n", 200),
        ("seed", 0),
        ("seed", None),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("prompt_logprobs", MAX_LOGPROBS),
        ("max_draft_tokens", 0),
        ("logit_bias", {0: -100, 5: 3.5}),
        ("logit_bias", {}),
        ("bad_words", ["no", [1, 2]]),
        ("bad_words", []),
        ("allowed_token_ids", (0, 1)),
        ("stop_token_ids", []),
        ("stop", "end"),
        ("stop", ["a", "b"]),
        ("stop", None),
    ],
    ids=str,
)
def test_values_at_the_edge_of_what_is_allowed_are_taken_as_given(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_stop_becomes_a_tuple_of_strings_whichever_way_it_was_given() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == SamplingParams(stop=[]).stop_strings == ()


@pytest.mark.parametrize("temperature, greedy", [(0, True), (1e-6, True), (1.1e-6, False), (1.0, False)])
def test_a_temperature_at_or_below_a_millionth_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_parameters_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "said"),
    [("tempreature", "did you mean 'temperature'?"), ("max_token", "did you mean 'max_tokens'?"), ("beams", "known: ")],
)
def test_a_name_that_is_none_is_told_the_nearest(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"SamplingParams has no parameter '{name}'; {re.escape(said)}"):
        SamplingParams(**{name: 1})
    assert next(iter(inspect.signature(SamplingParams).parameters)) == "temperature"


NAMES = ["--temperature", "--top-p", "--stop", "--max-tokens", "--num-draft-tokens", "--drafter", "--batch-size"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("--tempratur", "--temperature"),
        ("--temp", "--temperature"),
        ("--max_token", "--max-tokens"),
        ("--Drafters", "--drafter"),
        ("--batch", "--batch-size"),
        ("--port", None),
        ("--help-me", None),
        ("--serve", None),
        ("--x", None),
        ("", None),
    ],
)
def test_only_what_is_near_is_suggested(name: str, near: str | None) -> None:
    assert nearest(name, NAMES) == near


def test_the_derived_field_cannot_be_given() -> None:
    with pytest.raises(OptionError, match="SamplingParams has no parameter 'stop_strings'"):
        SamplingParams(stop_strings=("x",))  # type: ignore[call-arg]
