"""Other systems' spellings become our words, in the library and on the command line; a test for every row."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import pytest

from paceline import DraftModel, Eagle, NGram, Pard, Suffix
from paceline.compat import SPELLINGS, Notices, read_call, read_request, table, translate
from paceline.compat.reading import READERS
from paceline.compat.table import Spelling
from paceline.errors import OptionError
from tests.compat.probe import KNOWN, PROBE, PROMPT, shown, type_in
from tests.fakes import tiny_llm
from tests.spellings import CASES, Case, as_flags


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
    ({"speculative_config": {"model": "d", "parallel_drafting": True}}, Pard("d")),
    ({"speculative_config": {"method": "eagle3", "model": "d", "parallel_drafting": True}}, Eagle("d")),
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
