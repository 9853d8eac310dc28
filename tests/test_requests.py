"""A request is checked, gets its seed, its words and its detokenizer without any weights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from paceline.errors import OptionError
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.requests import Limits, check, find_seed, prepare
from tests.tokens import NUM_IDS, tokenizer

LIMITS = Limits(vocab_size=NUM_IDS, max_model_len=32, max_prompt_len=10, end_ids=(1, NUM_IDS + 7))
PROMPT = Prompt(None, [5, 6, 7])


def made(limits: Limits = LIMITS, prompt: Prompt = PROMPT, **params: Any) -> list[Any]:
    asked = SamplingParams(**params)
    check(prompt, asked, tokenizer(), limits)
    return prepare(prompt, asked, tokenizer(), limits, "7", 3)


def test_a_request_becomes_as_many_samples_as_it_asks_for() -> None:
    samples = made(n=3, max_tokens=4)
    assert [(sample.request_id, sample.index, sample.seed, sample.max_length) for sample in samples] == [
        ("7", index, 3, 7) for index in range(3)
    ]
    assert [sample.leader for sample in samples] == [None, samples[0], samples[0]]
    assert samples[1].tokens == [5, 6, 7] and samples[1].tokens is not samples[0].tokens
    assert samples[1].detokenizer is not samples[0].detokenizer


@pytest.mark.parametrize("most, length", [(None, 32), (40, 32), (29, 32), (28, 31)])
def test_a_text_never_outgrows_the_model(most: int | None, length: int) -> None:
    assert made(max_tokens=most)[0].max_length == length


@pytest.mark.parametrize(
    "prompt, params, sentence",
    [
        ([], {}, "the prompt is empty"),
        ([5] * 11, {}, "the prompt has 11 tokens; max_prompt_len=10 allows no more"),
        ([5] * 32, {}, "the prompt has 32 tokens; max_model_len=32 leaves room for 31"),
        ([NUM_IDS], {}, f"the prompt has token id {NUM_IDS}; the model's ids are 0 to {NUM_IDS - 1}"),
        ([5], {"stop_token_ids": [NUM_IDS]}, f"stop_token_ids has token id {NUM_IDS}"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(prompt: list[int], params: Any, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        made(prompt=Prompt(None, prompt), **params)


def test_who_wants_no_text_gets_none() -> None:
    with pytest.raises(OptionError, match=r"stop='x' is text, and detokenize=False makes none; give stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)
    said = []
    for wanted in (True, False):
        (sample,) = made(detokenize=wanted)
        sample.detokenizer.push(5)
        sample.detokenizer.finish()
        said.append(sample.detokenizer.text)
    assert said[0] and not said[1]


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(OptionError, match=r"stop=\['END'\] is text, but this model has no tokenizer"):
        check(PROMPT, SamplingParams(stop=["END"]), None, LIMITS)
    assert prepare(PROMPT, SamplingParams(stop_token_ids=[4]), None, LIMITS, "7", 3)[0].words.stops == [1, 4]


def test_ids_the_model_cannot_say_are_held_back_by_nobody() -> None:
    """Of end tokens, of special stop texts, and of words whose tokens lie beyond the head."""
    assert made(stop_token_ids=[4])[0].words.stops == [1, 4]
    assert made(stop_token_ids=[4], ignore_eos=True)[0].words.stops == [4]
    small = Limits(vocab_size=8, max_model_len=32, end_ids=(1, 9))
    special = made(small, stop=["</s>"], bad_words=["the", [3, 4]])[0]
    assert special.words.stops == [1, 1] and special.words.bad == [[3, 4]]
    assert made(bad_words=["the"])[0].words.bad


def test_a_seed_is_the_requests_own_or_its_runs_or_fresh() -> None:
    assert find_seed(-5, 0, 3) == -5
    mixed = {(run, number): find_seed(None, run, number) for run in (0, 1, -1, 2**64 - 1) for number in range(200)}
    assert len(set(mixed.values())) == len(mixed), "every request of every run has its own"
    assert all(find_seed(None, *key) == seed for key, seed in mixed.items())
    assert find_seed(None, None, 0) != find_seed(None, None, 0)
    for seed in [*mixed.values(), find_seed(None, None, 0)]:
        SamplingParams(seed=seed)  # it can be given back


def test_neither_models_nor_the_engine_are_loaded_for_it() -> None:
    program = "import sys, paceline.requests; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"transformers", "paceline.models.loader", "paceline.models.base", "paceline.engine.engine", "paceline.llm"}
    assert not heavy & set(found.stdout.split())
