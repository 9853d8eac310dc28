"""Reading `--drafter`."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import DraftModel, FirstOf, NGram, Suffix
from paceline.cli.drafters import combine, parse, settle
from paceline.compat.spec import join, split
from paceline.errors import OptionError


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("none", None),
        ("ngram", NGram()),
        ("suffix", Suffix()),
        ("ngram:max_match=3,min_match=1,num_draft_tokens=5", NGram(5, min_match=1, max_match=3)),
        ("ngram: max_match = 3 , min_match=1", NGram(min_match=1, max_match=3)),
        ("ngram:rule=transformers", NGram(rule="transformers")),
        ("suffix:tree=true,max_spec_factor=1.5", Suffix(tree=True, max_spec_factor=1.5)),
        ("suffix:tree=no,max_spec_factor=2", Suffix(tree=False, max_spec_factor=2.0)),
        ("smollm2-135m", DraftModel("smollm2-135m")),
        ("./folder/model", DraftModel("./folder/model")),
        ("./folder/model:num_draft_tokens=3", DraftModel("./folder/model", 3)),
        ("c:/models/a", DraftModel("c:/models/a")),
        ("c:/models/a:num_draft_tokens=3", DraftModel("c:/models/a", 3)),
        ("draft:model=smollm2-135m,cross_vocabulary=true", DraftModel("smollm2-135m", cross_vocabulary=True)),
    ],
)
def test_a_spec_becomes_the_config_it_names(spec: str, config: object) -> None:
    assert parse(spec) == config


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "names no drafter"),
        (":max_match=3", "names no drafter"),
        ("none:max_match=3", "none takes no options"),
        ("ngram:max_mach=3", "did you mean 'max_match'"),
        ("ngram:max_match=three", "allowed: a whole number"),
        ("ngram:max_match=3.5", "allowed: a whole number"),
        ("ngram:max_match=3,max_match=4", "twice"),
        ("ngram:max_match=3,", "is not key=value"),
        ("ngram:max_match=3,min_match", "is not key=value"),
        ("ngram:max_match=1,min_match=2", "min_match"),
        ("suffix:tree=maybe", "allowed: true or false"),
        ("suffix:max_spec_factor=big", "allowed: a number"),
        ("draft", "needs a model"),
        ("draft:num_draft_tokens=3", "needs a model"),
        ("./folder/model:model=other", "model twice"),
        ("sufix", "did you mean 'suffix'"),
        ("ngran:max_match=3", "did you mean 'ngram'"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused_in_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)


def test_only_key_and_value_after_the_last_colon_are_options() -> None:
    assert split("a:b:c") == ("a:b:c", {})
    assert split("a:b:c=1") == ("a:b", {"c": "1"})
    assert split("a:c=x=y") == ("a", {"c": "x=y"})
    assert split("c:/runs,seed=1") == ("c:/runs,seed=1", {})
    assert split("c:/runs,seed=1:c=2") == ("c:/runs,seed=1", {"c": "2"})


@pytest.mark.parametrize("model", ["d", "./some/folder", "runs,seed=1", "c:/runs/a=b"])
def test_a_draft_model_is_written_so_that_it_is_read_again(model: str) -> None:
    assert parse(join("draft", {"model": model})) == DraftModel(model)
    assert parse(join("draft", {"model": model, "num_draft_tokens": 3})) == DraftModel(model, 3)


LENGTH, QUANTIZATION = "num_draft_tokens", "quantization"


def settled(name: str, value: Any, *specs: str, quiet: bool = False) -> list[Any]:
    return settle(name, value, specs, [parse(spec) for spec in specs], quiet)


def test_an_option_beside_drafters_is_for_those_that_have_it_and_do_not_say_it_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert settled(LENGTH, 7, "ngram:max_match=2", "suffix") == [NGram(7, max_match=2), Suffix(7)]
    assert settled(LENGTH, 7, "ngram", "suffix:num_draft_tokens=3", "none") == [NGram(7), Suffix(3), None]
    assert settled(LENGTH, 3, "suffix:num_draft_tokens=3") == [Suffix(3)]
    assert settled(LENGTH, None, "ngram") == [NGram()]
    assert settled(QUANTIZATION, "int8", "ngram", "d") == [NGram(), DraftModel("d", quantization="int8")]
    assert not caplog.records


@pytest.mark.parametrize("specs", [[], ["none"], ["ngram", "suffix"]])
def test_an_option_that_applies_to_no_drafter_is_noticed(specs: list[str], caplog: pytest.LogCaptureFixture) -> None:
    plain = [parse(spec) for spec in specs]
    assert settled(QUANTIZATION, "int8", *specs) == plain
    assert settled(QUANTIZATION, "int8", *specs, quiet=True) == plain
    (record,) = caplog.records
    assert record.getMessage() == "a draft model's quantization int8 has no effect: no draft model was given"


@pytest.mark.parametrize("specs", [[], ["none"]])
def test_a_draft_length_without_a_drafter_is_noticed(specs: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert settled(LENGTH, 5, *specs) == [parse(spec) for spec in specs]
    (record,) = caplog.records
    assert record.getMessage().startswith("a draft length of 5 has no effect without a drafter")


@pytest.mark.parametrize(
    ("name", "value", "specs", "said"),
    [
        (LENGTH, 0, ["suffix"], "a draft length of 0 is not allowed; allowed: 1 or more"),
        (LENGTH, -1, [], "a draft length of -1 is not allowed"),
        (QUANTIZATION, "banana", ["ngram"], "quantization='banana' is not known"),
        (LENGTH, 3, ["ngram:num_draft_tokens=8"], "ngram:num_draft_tokens=8 and a draft length of 3 contradict"),
        (QUANTIZATION, "int8", ["d:quantization=int4"], "d:quantization=int4 and a draft model's quantization int8"),
    ],
)
def test_an_option_beside_drafters_is_refused_where_it_cannot_be_meant(
    name: str, value: Any, specs: list[str], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        settled(name, value, *specs)


def test_who_changes_the_drafter_later_may_give_it_another_length() -> None:
    assert settled(LENGTH, 3, "ngram:num_draft_tokens=8", quiet=True) == [NGram(8)]


def test_several_drafters_are_asked_in_the_order_given() -> None:
    assert combine([]) is None
    assert combine([NGram()]) == NGram()
    both = combine([Suffix(), NGram()])
    assert isinstance(both, FirstOf)
    assert both.configs == [Suffix(), NGram()]
    with pytest.raises(OptionError, match="none"):
        combine([NGram(), None])
