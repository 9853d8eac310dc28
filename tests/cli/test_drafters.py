"""Reading `--drafter`."""

from __future__ import annotations

import pytest

from paceline import DraftModel, FirstOf, NGram, Suffix
from paceline.cli.drafters import combine, parse, split, with_num_draft_tokens
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
        ("folder/model", DraftModel("folder/model")),
        ("folder/model:num_draft_tokens=3", DraftModel("folder/model", 3)),
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
        ("folder/model:model=other", "model twice"),
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


def test_a_draft_length_reaches_every_drafter_and_none_stays_none() -> None:
    assert with_num_draft_tokens(NGram(max_match=2), 7) == NGram(7, max_match=2)
    assert with_num_draft_tokens(NGram(), None) == NGram()
    assert with_num_draft_tokens(None, 7) is None
    with pytest.raises(OptionError, match="num_draft_tokens"):
        with_num_draft_tokens(Suffix(), 0)


def test_several_drafters_are_asked_in_the_order_given() -> None:
    assert combine([]) is None
    assert combine([NGram()]) == NGram()
    both = combine([Suffix(), NGram()])
    assert isinstance(both, FirstOf)
    assert both.configs == [Suffix(), NGram()]
    with pytest.raises(OptionError, match="none"):
        combine([NGram(), None])
