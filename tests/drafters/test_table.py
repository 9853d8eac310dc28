"""The one table of drafters: whatever names a drafter is read with it, so a row is all that a new one adds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import DraftModel, FirstOf, NGram, compat
from paceline.bench import results
from paceline.cli import compare, sweep
from paceline.cli.drafters import parse
from paceline.drafters import make, table
from paceline.drafters.formats import check_loads
from paceline.drafters.table import KINDS, LENGTH, Kind, Marks
from paceline.errors import OptionError

KNOWN = ["model", "drafter", "num_draft_tokens"]


@dataclass(frozen=True)
class Toy:
    """A drafter with weights."""

    model: Any
    num_draft_tokens: int = 4

    def create(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """One row more."""
    kind = Kind("toy", "a toy", "draws lots", f"{__name__}:Toy", ("toy_method",), Marks(keys=("toy_heads",)))
    monkeypatch.setattr(table, "KINDS", (*KINDS, kind))
    monkeypatch.setattr(compat.table, "KINDS", (*KINDS, kind))
    monkeypatch.setattr(compat.table, "SPELLINGS", tuple(compat.table._vllm()))
    return kind


def test_a_row_brings_a_word_with_options(toy: Kind) -> None:
    assert parse("toy:model=a/b,num_draft_tokens=2") == Toy("a/b", 2)
    with pytest.raises(OptionError, match="drafter 'toy' needs a model; write toy:model=… on the command line"):
        make("toy")
    with pytest.raises(OptionError, match="did you mean 'toy'"):
        make("toyy")
    with pytest.raises(OptionError, match=r"allowed: none, ngram, suffix, draft, .*toy, or a model's name or path"):
        make(5)


def test_a_row_brings_its_published_folders(toy: Kind, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "toy_heads": 3}))
    assert make(str(tmp_path)) == Toy(str(tmp_path))
    assert make(tmp_path, num_draft_tokens=2) == Toy(str(tmp_path), 2)
    assert compat.translate({"speculative_model": str(tmp_path)}, KNOWN)["drafter"] == Toy(str(tmp_path))
    with pytest.raises(OptionError, match="holds a toy, not a draft model; write toy:model="):
        check_loads(str(tmp_path))


def test_a_row_is_measured_as_a_draft_model_is(toy: Kind, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"toy_heads": 3}))
    at = str(tmp_path)
    flags = {"num_speculative_tokens": 2, "ngram_prompt_lookup_max": 3, "ngram_prompt_lookup_min": 1}
    chosen = {"drafter": None, "speculative_model": at, "drafter_quantization": None, **flags}
    first, second = compare.read_variants(chosen)
    assert (first.drafter, second.drafter) == (Toy(at, 2), NGram(2, 1, 3))
    assert results._field(first) == "speculative"
    swept = {"drafter": None, "draft_model": at, "drafter_quantization": None, "num_draft_tokens": "1..2"}
    assert [variant.drafter for variant in sweep.read_variants(swept)] == [Toy(at, 1), Toy(at, 2)]


def test_a_row_brings_its_method_elsewhere(toy: Kind) -> None:
    given = {"method": "toy_method", "model": "d", "num_speculative_tokens": 2}
    assert compat.translate({"speculative_config": given}, KNOWN)["drafter"] == Toy("d", 2)
    with pytest.raises(OptionError, match="needs a model, too: a folder or a hub id"):
        compat.translate({"speculative_config": {"method": "toy_method"}}, KNOWN)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.loads], ids=lambda kind: kind.word)
def test_a_kind_that_is_only_known_is_refused_by_name(kind: Kind) -> None:
    said = f"drafter {kind.word!r}, {kind.called}, is known but cannot be loaded yet; drafters that load: ngram, suffix"
    for read in (make, parse):
        with pytest.raises(OptionError) as caught:
            read(kind.word)
        assert said in str(caught.value)
    with pytest.raises(OptionError, match="is known but cannot be loaded yet"):
        parse(f"{kind.word}:model=x")


def test_a_path_with_a_drafters_name_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("medusa", "ngram"):
        (tmp_path / word).mkdir()
        assert make(word) == DraftModel(word)


def test_words_are_told_apart_and_every_drafter_says_how_long_its_drafts_may_be() -> None:
    assert len({kind.word for kind in KINDS}) == len(KINDS)
    methods = [method for kind in KINDS for method in kind.methods]
    assert len(set(methods)) == len(methods)
    for kind in table.loadable():
        assert kind.does and LENGTH in kind.options
        assert kind.config.__name__ in paceline.__all__
        made = kind.make({"model": "d"} if kind.has_model else {})
        assert table.find_config(made) is kind
        assert dataclasses.replace(made, **{LENGTH: 3}).num_draft_tokens == 3


def test_composition_is_of_no_kind_but_its_parts_are() -> None:
    both = FirstOf("ngram", "d")
    assert table.find_config(both) is None
    assert [table.find_config(config) for config in both.configs] == [table.find("ngram"), table.MODEL]
    assert both.configs == [NGram(), DraftModel("d")]
