"""Reports: the table, the footnotes, the record, the coloured answer and the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import NGram, SamplingParams, Suffix
from paceline.bench import machine, report
from paceline.bench.compare import Comparison, Difference, Measured, Pass, Plan, Variant
from paceline.engine.sequence import Provenance
from paceline.engine.stats import SequenceStats
from paceline.outputs import CompletionOutput
from paceline.prompts import Prompt
from tests.cli.checkpoints import make_tokenizer

TOKENIZER = make_tokenizer()
IDS = TOKENIZER.encode("the riders rest — then the line goes on")


def output(ids: list[int], accepted: int) -> CompletionOutput:
    """An answer of which the first `accepted` tokens were drafted, one round each of two."""
    told = [Provenance("x", "accepted", 0, depth + 1) for depth in range(accepted)]
    told += [Provenance(None, "corrected", 0, accepted + 1)] if accepted else []
    told += [Provenance(None, "plain", n, 1) for n in range(len(ids) - len(told))]
    stats = SequenceStats(rounds=len(ids) - accepted, tokens=len(ids))
    if accepted:
        stats.proposed, stats.accepted = [4] * (accepted + 1), [2] * accepted + [0]
    return CompletionOutput(0, TOKENIZER.decode(ids), ids, "length", None, None, 0, stats, told)


def example(names: tuple[str, ...] = ("ngram", "suffix")) -> Comparison:
    plan = Plan(
        ["first", "second"],
        [Prompt("a", [1]), Prompt("b", [2, 3])],
        SamplingParams(temperature=0.0),
        [Variant(name, NGram() if "ngram" in name else Suffix()) for name in names],
    )
    passes = [Pass(2.0, [output(IDS, 0), output(IDS[:6], 0)])]
    measured = [Measured(plan.variants[0], passes)]
    for place, variant in enumerate(plan.drafters):
        measured.append(Measured(variant, [Pass(1.0 + place, [output(IDS, 3), output(IDS[:6], 5)])]))
    return Comparison(plan, measured)


def printed(what: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_has_a_row_a_variant_and_fits_a_narrow_terminal() -> None:
    text = printed(report.table(example()))
    tokens = len(IDS) + 6
    lines = [line.split() for line in text.splitlines() if "×" in line]
    rounds = tokens - 8
    assert lines[0] == ["plain", "2.00", "s", f"{tokens / 2:.1f}", "1.00×", "1.00", "–", "2/2"]
    assert lines[1] == ["ngram", "1.00", "s", f"{tokens:.1f}", "2.00×", f"{tokens / rounds:.2f}", "40%", "2/2"]
    assert lines[2] == ["suffix", "2.00", "s", f"{tokens / 2:.1f}", "1.00×", f"{tokens / rounds:.2f}", "40%", "2/2"]
    assert max(map(len, text.splitlines())) <= 80


def test_a_variant_is_named_by_its_word_unless_two_share_it() -> None:
    assert report.labels(example(("ngram:max_match=3", "folder/suffix"))) == ["plain", "ngram", "suffix"]
    full = report.labels(example(("ngram:max_match=3", "ngram:max_match=2,min_match=1")))
    assert full == ["plain", "ngram\nmax_match=3", "ngram\nmax_match=2\nmin_match=1"]


def test_a_difference_shows_in_the_table_the_footnotes_and_the_record() -> None:
    result = example()
    assert report.footnotes(result) == []
    result.measured[2].differences = [Difference(1, 0, 4, IDS[4], 7, 0.00003)]
    assert "1/2" in printed(report.table(result))
    note, meaning = report.footnotes(result)
    assert note == "suffix, second: differs from token 5 on, margin 0.00003"
    assert meaning.startswith("margin: ")
    data = report.record(result)["variants"][2]
    assert data["identical"] == 1
    assert [row["identical"] for row in data["answers"]] == [True, False]
    expected = {"round": 0, "position": 4, "expected": IDS[4], "got": 7, "margin": 0.00003}
    assert data["answers"][1]["difference"] == expected


def test_a_difference_without_margin_is_told_without_one() -> None:
    result = example()
    result.measured[1].differences = [Difference(0, 0, 0, 1, 2, None)]
    assert report.footnotes(result) == ["ngram, first: differs from token 1 on"]


def test_the_record_survives_json_with_all_its_figures(tmp_path: Path) -> None:
    result = example()
    report.write_json(tmp_path / "deep" / "results.json", {**machine.record(), **report.record(result)})
    data = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert data["versions"].keys() == {"paceline", "torch", "python"}
    assert data["machine"]["cores"] >= 1
    plain, ngram, _ = data["variants"]
    assert plain["drafter"] is None
    assert plain["acceptance"] is None
    assert ngram["drafter"] == repr(NGram())
    assert ngram["seconds"] == [1.0]
    assert ngram["speed_up"] == 2.0
    assert ngram["proposed_by_position"] == [8, 8, 8, 8, 4, 4]
    assert ngram["acceptance_by_position"] == [0.5, 0.5, 0.5, 0.25, 0.5, 0.0]
    assert ngram["answers"][0]["token_ids"] == IDS
    assert data["prompts"][1] == {"name": "second", "text": "b", "tokens": 2}


def test_a_coloured_answer_is_the_whole_text_and_every_token_has_its_colour() -> None:
    answered = output(IDS, 3)
    shown = report.colour(answered, TOKENIZER)
    assert shown.plain == answered.text
    drafted = TOKENIZER.decode(IDS[:3])
    styles = [(shown.plain[span.start : span.end], str(span.style)) for span in shown.spans]
    assert "".join(text for text, style in styles if style == "bold green") == drafted
    assert "".join(text for text, _ in styles) == answered.text


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    ids = TOKENIZER.encode("é—")
    assert len(ids) == 5  # as bytes
    shown = report.colour(output(ids, 0), TOKENIZER)
    assert shown.plain == "é—"
    assert [shown.plain[span.start : span.end] for span in shown.spans] == ["é", "—"]


def test_the_answer_shown_is_identical_to_plain_and_owes_most_to_drafts() -> None:
    result = example()
    chosen = report.choose_answer(result)
    assert chosen is not None
    assert chosen == (result.measured[1], 1)  # five of six tokens
    for measured in result.measured[1:]:
        measured.differences = [Difference(1, 0, 0, 1, 2, None)]
    assert report.choose_answer(result) == (result.measured[1], 0)
    text = printed(report.answer(result, TOKENIZER))
    assert "the riders rest — then the line goes on" in text
    assert "drafted and accepted" in text
    assert "after a draft accepted whole" not in text  # no such token, so no such line
    for measured in result.measured[1:]:
        measured.differences.append(Difference(0, 0, 0, 1, 2, None))
    assert report.answer(result, TOKENIZER) is None


@pytest.mark.parametrize("names", [(), ("ngram",), ("ngram:max_match=3", "ngram:max_match=2", "suffix")])
def test_the_picture_is_drawn_for_any_number_of_drafters(tmp_path: Path, names: tuple[str, ...]) -> None:
    report.plot(example(names), tmp_path / "pictures" / "compare.png", "title")
    assert (tmp_path / "pictures" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_named_in_one_line() -> None:
    assert "\n" not in machine.summary()
    assert f"{machine.num_cores()} cores" in machine.summary()


def test_outside_a_checkout_there_is_no_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "paceline")
    assert machine.revision() is None
