"""Other systems' spellings become our words, in the library and on the command line; a test for every row."""

from __future__ import annotations

import inspect
import logging
import re
import shlex
from dataclasses import fields
from typing import Annotated, Any

import pytest
import torch
import transformers
import typer

from paceline import LLM, DraftModel, FirstOf, NGram, SamplingParams, Suffix
from paceline.cli import drafters
from paceline.cli.command import Command
from paceline.compat import SPELLINGS, Notices, read_call, read_request, table, translate
from paceline.compat.reading import READERS
from paceline.compat.table import Spelling
from paceline.errors import OptionError
from paceline.llm import EngineOptions
from tests.cli.checkpoints import make_model, make_tokenizer
from tests.fakes import Hopeless, tiny_llm, tiny_model
from tests.spellings import CASES, Case, as_flags

KNOWN = ["model", "drafter", "num_draft_tokens", *(item.name for item in fields(EngineOptions))]
PROMPT = [5, 17, 42, 5, 17]


# A command that takes everything of ours.


def _option(kind: Any) -> Any:
    return Annotated[kind, typer.Option()]


OPTIONS: dict[str, Any] = {
    "drafter": list[str] | None,
    "stop": list[str] | None,
    "stop_token_id": list[int] | None,
    "prefix_caching": bool | None,
    "ignore_eos": bool | None,
    **dict.fromkeys(("model", "dtype", "device", "quantization", "template", "acceptance"), str | None),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "gpu_memory_utilization"), float | None),
    **dict.fromkeys(("num_draft_tokens", "max_tokens", "min_tokens", "top_k", "seed", "max_model_len"), int | None),
    **dict.fromkeys(("max_prompt_len", "max_num_seqs", "block_size", "num_pages", "max_batched_tokens"), int | None),
    "tensor_parallel_size": int | None,
}


ARGUMENT = Annotated[list[str] | None, typer.Argument()]


def make_probe() -> Any:
    def probe(**options: Any) -> None:
        pass

    probe.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(kind))
            for name, kind in OPTIONS.items()
        ]
        + [inspect.Parameter("prompt", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ARGUMENT)]
    )
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(probe)
    return typer.main.get_command(app)


PROBE = make_probe()
CALLED = {"template": "prompt_template", "stop_token_id": "stop_token_ids"}


def type_in(text: str) -> dict[str, Any]:
    """What a command gets from these words, in the library's names; a drafter as its config."""
    context = PROBE.make_context("probe", shlex.split(text))
    given = {name: value for name, value in context.params.items() if value not in (None, ())}
    got = {CALLED.get(name, name): list(v) if isinstance(v, tuple) else v for name, v in given.items()}
    if "drafter" in got:
        (spec,) = got["drafter"]
        got["drafter"] = drafters.parse(spec)
    return got


def read(case: Case) -> dict[str, Any]:
    if case.call:
        progress, how = read_call(dict(case.given), True, chat=True)
        return how if progress else {"progress": progress, **how}
    return read_request(case.given, 10, Notices()) if case.request else translate(case.given, KNOWN)


def check(where: str, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """One way in: the result, the notice or the refusal that the case states."""
    caplog.clear()
    typed = case.typed or as_flags(case.given)
    library = where == table.LIBRARY
    if case.refusal:
        with pytest.raises(OptionError) as caught:
            read(case) if library else type_in(typed)
        assert case.refusal in str(caught.value) and "\n" not in str(caught.value)
        return
    expected = case.means if library or case.options is None else case.options
    assert (read(case) if library else type_in(typed)) == expected
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == bool(case.notice)
    assert all(case.notice in notice for notice in notices)


def shown(value: object, most: int) -> str:
    """A value in a test's name: short, and the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(value).split()))[:most]


@pytest.mark.parametrize("row", SPELLINGS, ids=lambda row: row.id)
def test_a_spelling_means_what_the_table_says(row: Spelling, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[row.id]
    name, _, key = row.name.partition(".")
    assert name in case.given and (not key or key in case.given[name])
    assert bool(case.refusal) == (row.effect in (table.REFUSED, table.LATER))
    assert bool(case.notice) == (row.effect == table.NO_EFFECT or name == "max_length")
    with caplog.at_level(logging.WARNING, "paceline"):
        for where in (table.LIBRARY, table.COMMAND_LINE):
            if row.holds(where):
                check(where, case, caplog)


def test_every_row_has_its_test_and_every_test_its_row() -> None:
    assert {row.id for row in SPELLINGS} == CASES.keys()
    assert len({row.id for row in SPELLINGS}) == len(SPELLINGS)


def test_the_table_speaks_with_one_voice() -> None:
    """A name that several systems have is read in one way, and a refusal says why."""
    for row in SPELLINGS:
        others = [other for other in SPELLINGS if (other.name, other.value) == (row.name, row.value)]
        assert len({(other.to, other.effect) for other in others if other.where == row.where}) == 1, row.id
        assert bool(row.to) == (row.effect == table.RENAMED or (row.effect == table.SAME and not row.value)), row.id
        assert row.note or row.effect not in (table.REFUSED, table.LATER), row.id
    assert set(READERS) | table.SWITCHES <= {row.name for row in SPELLINGS}
    assert {row.system for row in SPELLINGS} == {"vLLM", "LMFlow", "Colossal-Inference", "PaddleNLP"}


# Further values of one spelling.

OLD: list[tuple[dict[str, Any], Any]] = [
    ({"speculative_model": None, "num_speculative_tokens": None}, None),
    ({"speculative_model": "d", "num_draft_tokens": 3}, DraftModel("d", 3)),
    ({"speculative_model": "d", "num_draft_tokens": 3, "gamma": 3}, DraftModel("d", 3)),
    ({"speculative_model": "d", "draft_model": "d"}, DraftModel("d")),
    ({"speculative_config": {"model": "ngram"}}, NGram(5)),
    ({"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 1}}, NGram(1)),
    ({"speculative_config": {"method": "ngram", "model": "ngram"}}, NGram(5)),
    ({"speculative_config": '{"method": "ngram", "prompt_lookup_max": 3}'}, NGram(5, max_match=3)),
    ({"speculative_config": {"method": None, "model": "d", "prompt_lookup_max": None}}, DraftModel("d")),
    ({"quant_type": ""}, None),
]


@pytest.mark.parametrize("given, expected", OLD, ids=lambda value: shown(value, 60))
def test_spellings_together_make_one_drafter(given: dict[str, Any], expected: Any) -> None:
    assert translate(given, KNOWN).get("drafter") == expected


BESIDE_OURS: list[tuple[dict[str, Any], Any]] = [
    ({"drafter": "ngram", "ngram_prompt_lookup_max": 3}, NGram(min_match=1, max_match=3)),
    ({"drafter": "ngram", "ngram_prompt_lookup_max": 3, "num_speculative_tokens": 4}, NGram(4, 1, 3)),
    ({"drafter": "ngram", "ngram_prompt_lookup_max": 3, "ngram_prompt_lookup_min": 2}, NGram(5, 2, 3)),
    ({"drafter": "ngram", "speculate_max_ngram_size": 2}, NGram(max_match=2)),
    ({"drafter": "d", "speculative_model_quantization": "int8"}, DraftModel("d", quantization="int8")),
    ({"drafter": "d", "draft_model_quant_type": "weight_only_int4"}, DraftModel("d", quantization="int4")),
    ({"drafter": "d", "speculate_method": "draft_model"}, "d"),
]


@pytest.mark.parametrize("given, expected", BESIDE_OURS, ids=lambda value: shown(value, 60))
def test_a_foreign_option_applies_to_the_drafter_that_our_own_word_names(
    given: dict[str, Any], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert translate(given, KNOWN)["drafter"] == expected
    assert not caplog.records


def test_an_engine_takes_a_foreign_option_beside_our_own_drafter() -> None:
    ours = tiny_llm(NGram(4, 1, 3)).generate([PROMPT * 3], temperature=0, max_tokens=40, ignore_eos=True)
    llm = tiny_llm("ngram", ngram_prompt_lookup_max=3, num_speculative_tokens=4)
    theirs = llm.generate([PROMPT * 3], temperature=0, max_tokens=40, ignore_eos=True)
    assert theirs[0].outputs[0].stats.proposed == ours[0].outputs[0].stats.proposed != []
    assert theirs[0].outputs[0].stats.rounds == ours[0].outputs[0].stats.rounds


@pytest.mark.parametrize(
    "typed, spec",
    [
        ("--draft_model gpt2 --gamma 5", "draft:model=gpt2,num_draft_tokens=5"),
        ("--draft-model=gpt2 --gamma=5", "draft:model=gpt2,num_draft_tokens=5"),
        ("--draft_model c:/a,b=1 --gamma 5", "c:/a,b=1:num_draft_tokens=5"),
        ("--speculative-model [ngram] --ngram_prompt_lookup-max 3", "ngram:max_match=3,min_match=1"),
        ("--speculate_method inference_with_reference", "ngram:rule=reference"),
        ("--speculate_method None", "none"),
    ],
)
def test_a_foreign_drafter_is_written_as_ours(typed: str, spec: str) -> None:
    assert PROBE.make_context("probe", shlex.split(typed)).params["drafter"] == [spec]


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("--enable-prefix-caching", {"prefix_caching": True}),
        ("--no-enable-prefix-caching", {"prefix_caching": False}),
        ("--no_enable_prefix_caching", {"prefix_caching": False}),
        ("--do_sample", {"temperature": 1.0}),
        ("--do_sample True", {"temperature": 1.0}),
        ("--do_sample --temperature 0.7", {"temperature": 0.7}),
        ("--do_sample 0 --temperature 0.0", {"temperature": 0.0}),
        ("--stop_token 7", {"stop_token_ids": [7]}),
        ("--stop_token 7 --eos_token_id 8 --stop_token_id 9", {"stop_token_ids": [9, 7, 8]}),
        ("--stop_token X --stop Y", {"stop": ["Y", "X"]}),
        ("--max_output_len 8", {"max_tokens": 8}),
        ("--max_output_len 8 --max_new_tokens 4", {"max_tokens": 4}),
        ("--max_output_len 8 --max-tokens 4", {"max_tokens": 4}),
        ("--max_n_spec_tokens 3", {"num_draft_tokens": 3}),
        ("--gamma 3 --drafter suffix", {"num_draft_tokens": 3, "drafter": Suffix()}),
        ("--drafter d --speculative-model-quantization int8", {"drafter": DraftModel("d", quantization="int8")}),
        ("--drafter ngram --ngram-prompt-lookup-max 3", {"drafter": NGram(min_match=1, max_match=3)}),
        ("--append_attn --inference_model 1 --top_k 5", {"top_k": 5}),
        ("-tp 1", {"tensor_parallel_size": 1}),
        ("-tp=1 -pp 1 -q int8", {"tensor_parallel_size": 1, "quantization": "int8"}),
        ("--user_input '-5 and' -- more", {"prompt": ["-5 and", "more"]}),
    ],
)
def test_flags_that_mean_something_beside_others(typed: str, expected: dict[str, Any]) -> None:
    assert type_in(typed) == expected


# What cannot be meant.

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
    ({"drafter": "ngram", "speculate_method": "draft_model"}, ("speculate_method", "needs the draft model")),
    ({"speculative_model": "[ngram]"}, ("'[ngram]'", "ngram_prompt_lookup_max")),
    ({"speculative_model": "d", "num_speculative_tokens": 0}, ("num_draft_tokens=0", "1 or more")),
    ({"speculative_config": {"method": "suffix", "num_speculative_tokens": 0}}, ("0", "1 or more")),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, ("0", "1 or more")),
    ({"speculative_config": {}}, ("'model'", "'method'")),
    ({"speculative_config": {"method": "draft_model"}}, ("draft_model", "needs the draft model")),
    ({"speculate_method": "draft_model"}, ("speculate_method", "needs the draft model")),
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


# Notices.

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


# A whole engine.


def test_our_own_options_pass_untouched() -> None:
    given = {"dtype": "float32", "drafter": "ngram", "prefix_caching": False}
    assert translate(given, KNOWN) == given
    assert translate({"drafter": None}, KNOWN) == {"drafter": None}


def test_an_engine_understands_foreign_spellings(caplog: pytest.LogCaptureFixture) -> None:
    given = {"model": tiny_model(layers=1), "num_speculative_tokens": 2}
    with caplog.at_level(logging.WARNING, "paceline"):
        llm = tiny_llm(
            speculative_config=given,
            enable_prefix_caching=False,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=20,
            enforce_eager=True,
        )
    drafter, scheduler = llm.engine.drafter, llm.engine.scheduler
    assert drafter is not None and (drafter.name, drafter.max_nodes) == ("draft_model", 2)
    assert (scheduler.prefix_caching, scheduler.max_batched_tokens, scheduler.pool.num_pages) == (False, 32, 20)
    assert "enforce_eager" in caplog.text


def test_a_colossal_script_runs_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """A loaded model and tokenizer, a template, a config for each call, and a drafter switched on and off between."""
    tokenizer = make_tokenizer()
    model, draft = make_model(len(tokenizer)), make_model(len(tokenizer), seed=1)
    engine = LLM(
        model,
        tokenizer=tokenizer,
        dtype=torch.float32,
        max_batch_size=4,
        max_input_len=160,
        max_output_len=40,
        prefill_ratio=1.2,
        block_size=16,
        max_n_spec_tokens=3,
        prompt_template="vicuna",
        verbose=True,
    )
    assert (engine.max_model_len, engine.options.max_num_seqs) == (200, 4)
    generation_config = transformers.GenerationConfig(
        pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, max_length=180, do_sample=False
    )
    plain = engine.generate(prompts=["the rider"], generation_config=generation_config)
    engine.set_drafter(draft)
    assert engine.engine.drafter is not None and engine.engine.drafter.max_nodes == 3
    drafted = engine.generate(prompts=["the rider"], generation_config=generation_config)
    engine.set_drafter(None)
    assert engine.engine.drafter is None
    expected = engine.generate(
        "the rider", SamplingParams(temperature=0, max_tokens=180 - len(plain[0].prompt_token_ids))
    )
    assert "USER: the rider ASSISTANT:" in str(plain[0].prompt)
    for output in (plain, drafted):
        assert output[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert sum(drafted[0].outputs[0].stats.proposed) > 0


def test_the_longest_prompt_and_the_usual_answer_hold_for_requests_that_say_nothing() -> None:
    llm = tiny_llm(max_input_len=8, max_output_len=5, max_model_len=None)
    quiet = {"ignore_eos": True, "seed": 1}
    assert llm.max_model_len == 13
    assert len(llm.generate([PROMPT], **quiet)[0].outputs[0].token_ids) == 5
    assert len(llm.generate([PROMPT], max_new_tokens=2, **quiet)[0].outputs[0].token_ids) == 2
    assert len(llm.generate([PROMPT], SamplingParams(max_tokens=7, **quiet))[0].outputs[0].token_ids) == 7  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the prompt has 9 tokens; max_prompt_len=8 allows no more"):
        llm.generate([[5] * 9])


def test_requests_by_other_names_are_the_same_requests() -> None:
    llm = tiny_llm()
    ours = SamplingParams(temperature=0.8, top_k=9, max_tokens=12, seed=3, stop_token_ids=[11])
    expected = llm.generate([PROMPT], ours)[0].outputs[0].token_ids
    theirs: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "seed": 3, "eos_token_id": 11}
    assert llm.generate([PROMPT], max_new_tokens=12, **theirs)[0].outputs[0].token_ids == expected
    assert llm.generate([PROMPT], max_length=12 + len(PROMPT), **theirs)[0].outputs[0].token_ids == expected
    streamed = [token for chunk in llm.stream(PROMPT, max_new_tokens=12, **theirs) for token in chunk.token_ids]
    assert streamed == expected
    given = transformers.GenerationConfig(do_sample=True, temperature=0.8, top_k=9, max_new_tokens=12, eos_token_id=11)
    assert llm.generate([PROMPT], generation_config=given, seed=3)[0].outputs[0].token_ids == expected


def test_max_length_counts_each_prompt_for_itself() -> None:
    llm = tiny_llm()
    outputs = llm.generate([PROMPT, PROMPT[:2]], max_length=9, ignore_eos=True, seed=1)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 7]


def test_an_end_by_id_stands_beside_the_models_own() -> None:
    llm = tiny_llm()
    plain = llm.generate([PROMPT], temperature=0, max_tokens=8, ignore_eos=True)[0].outputs[0].token_ids
    cut = llm.generate([PROMPT], temperature=0, max_tokens=8, eos_token_id=plain[3])[0].outputs[0]
    assert cut.token_ids == plain[: plain.index(plain[3]) + 1] and cut.finish_reason == "stop"
    own = llm.generate([PROMPT], max_tokens=8, eos_token_id=9, logit_bias={2: 100.0})[0].outputs[0]
    assert (own.token_ids, own.finish_reason) == ([2], "stop")


def test_sampling_parameters_and_spellings_together_are_refused() -> None:
    with pytest.raises(OptionError, match="sampling_params and max_new_tokens were both given"):
        tiny_llm().generate([PROMPT], SamplingParams(), max_new_tokens=4)


@pytest.mark.parametrize("given", [transformers.GenerationConfig(), {"max_tokens": 4}, 5])
def test_only_sampling_parameters_are_sampling_parameters(given: Any) -> None:
    with pytest.raises(OptionError, match=f"sampling_params must be SamplingParams, not {type(given).__name__}"):
        tiny_llm().generate([PROMPT], given)


def test_chat_takes_spellings_and_a_special_token_can_be_stopped_at() -> None:
    tokenizer = make_tokenizer()
    llm = LLM(make_model(len(tokenizer)), tokenizer=tokenizer, kernels="reference", max_model_len=200)
    asked = [{"role": "user", "content": "the rider"}]
    ours = llm.chat(asked, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    assert llm.chat(asked, do_sample=False, max_new_tokens=6)[0].outputs[0].token_ids == ours
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    biased = {"logit_bias": {start: 100.0}, "max_new_tokens": 6, "do_sample": False}
    assert len(llm.chat(asked, **biased)[0].outputs[0].token_ids) == 6  # type: ignore[arg-type]
    stopped = llm.chat(asked, stop_token="<|im_start|>", **biased)[0].outputs[0]  # type: ignore[arg-type]
    assert (stopped.token_ids, stopped.finish_reason) == ([start], "stop")


def test_a_draft_length_holds_for_drafters_that_do_not_bring_their_own() -> None:
    llm = tiny_llm("ngram", num_draft_tokens=3)
    assert llm.engine.drafter is not None and llm.engine.drafter.max_nodes == 3
    for given, length in (("suffix", 3), (tiny_model(layers=1), 3), (Suffix(9), 9), (FirstOf(NGram(2), Suffix(4)), 4)):
        llm.set_drafter(given)
        assert llm.engine.drafter.max_nodes == length


def test_a_model_may_be_named_as_others_name_it() -> None:
    llm = LLM(model_name_or_path=tiny_model(), kernels="reference", max_model_len=64)
    assert llm.generate([PROMPT], temperature=0, max_tokens=4)[0].outputs[0].token_ids
    with pytest.raises(OptionError, match=r"model='smollm2-135m' and model_name_or_path='other' contradict"):
        LLM("smollm2-135m", model_name_or_path="other")
