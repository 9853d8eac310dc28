"""What the terminal shows of a measurement: tables, notes, the verdict, an answer in colours."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from paceline.bench import report
from paceline.bench.differences import Difference
from tests.bench.examples import IDS, TOKENIZER, comparison, example, record


def printed(what: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_has_a_row_a_variant_and_fits_a_narrow_terminal() -> None:
    text = printed(report.table(record(example("ngram", "suffix"))))
    tokens = len(IDS) + 6
    lines = [line.split() for line in text.splitlines() if "×" in line]
    rounds = tokens - 8
    assert lines[0] == ["plain", "2.00", "s", f"{tokens / 2:.1f}", "1.00×", "–", "1.00", "–", "2/2"]
    fast = ["2.00×", "2.00–2.00", f"{tokens / rounds:.2f}", "40%", "2/2"]
    assert lines[1] == ["ngram", "1.00", "s", f"{tokens:.1f}", *fast]
    slow = ["1.00×", "1.00–1.00", f"{tokens / rounds:.2f}", "40%", "2/2"]
    assert lines[2] == ["suffix", "2.00", "s", f"{tokens / 2:.1f}", *slow]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_a_sweeps_table_has_nine_columns_in_eighty_characters() -> None:
    times = {str(length): [100.0, 99.0] for length in range(1, 12)}
    data = record(comparison({"plain": [123.0, 150.0], **times}), "sweep")
    text = printed(report.table(data))
    lines = [line.split() for line in text.splitlines() if "×" in line]
    assert [line[0] for line in lines] == ["plain", *times]
    assert len(lines[1]) == 10  # “s” is a word
    assert lines[1][4] == f"{273 / 199:.2f}×"
    assert lines[1][6] == f"{(len(IDS) + 6) / (len(IDS) - 2):.2f}×"
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_acceptance_by_position_is_told_for_each_drafter_and_of_a_sweep_for_the_longest_drafts() -> None:
    text = printed(report.positions(record(example("ngram", "suffix"))))
    lines = [line.split() for line in text.splitlines() if "%" in line]
    assert lines == [[name, "50%", "50%", "50%", "25%", "50%", "0%"] for name in ("ngram", "suffix")]
    swept = printed(report.positions(record(comparison({"plain": [1.0], "2": [1.0], "7": [1.0]}), "sweep")))
    assert "7 drafted" in swept
    assert "2 drafted" not in swept
    assert report.positions(record(example())) is None


def test_no_position_of_a_long_draft_is_left_out() -> None:
    data = record(example("ngram", "suffix"))
    long = [number / 100 for number in range(24, 0, -1)]
    data["variants"][2]["acceptance_by_position"] = long
    lines = [line.split() for line in printed(report.positions(data)).splitlines()]
    heads = [line[2:] for line in lines if line[:2] == ["at", "position"]]
    assert heads == [[str(at) for at in range(first, last)] for first, last in ((1, 11), (11, 21), (21, 25))]
    assert [cell for line in lines if line[:1] == ["suffix"] for cell in line[1:]] == [f"{share:.0%}" for share in long]
    assert len([line for line in lines if line[:1] == ["ngram"]]) == 1  # nothing of it stands below


def test_long_drafts_and_several_of_a_kind_fit_eighty_columns_with_no_number_cut() -> None:
    names = ("ngram:max_match=3,min_match=1", "ngram:max_match=4,num_draft_tokens=12", "some/folder/smollm2-135m")
    data = record(example(*names))
    for row in data["variants"][1:]:
        row["acceptance_by_position"], row["proposed_by_position"] = [1.0] * 12, [50] * 12
        row["median_seconds"], row["tokens_per_second"], row["answered"] = 1234.5, 12345.6, 1000
        row["speed_up_interval"] = [10.25, 11.75]
    for shown in (report.table(data), report.positions(data)):
        lines = printed(shown).splitlines()
        rows = [line.split() for line in lines if line.startswith((" ngram", " smollm2"))]
        assert [row[:2] for row in rows[:2]] == [["ngram", "a"], ["ngram", "b"]]
        assert rows[2][0] == "smollm2-135m"
        assert max(map(len, lines)) <= 80 and "…" not in printed(shown)
        assert " ".join(rows[2][1:]) in ("1234.50 s 12345.6 0.67× 10.25–11.75 1.50 40% 2/1000", " ".join(["100%"] * 10))
    assert report.footnotes(data)[:2] == [f"ngram a: {names[0]}", f"ngram b: {names[1]}"]


def test_a_difference_shows_in_the_table_the_footnotes_and_the_verdict() -> None:
    result = example("ngram", "suffix")
    assert report.differences(record(result)) == []
    assert report.verdict(record(result)).endswith("All 4 answers with drafts are plain's, token for token.")
    result.measured[2].differences = [Difference(1, 0, 4, IDS[4], 7, 0.00003)]
    data = record(result)
    assert "1/2" in printed(report.table(data))
    note, meaning = report.differences(data)
    assert note == "suffix, prompt 1: differs from token 5 on, margin 0.00003"
    assert meaning.startswith("margin: ")
    assert report.verdict(data).endswith("3 of 4 answers with drafts are plain's, token for token.")
    result.measured[2].differences = [Difference(1, 0, 0, 1, 2, None)]
    assert report.differences(record(result)) == ["suffix, prompt 1: differs from token 1 on"]


def test_a_note_says_what_acceptance_of_a_tree_counts() -> None:
    said = "drafts accepted, of a tree: by its depth, not by its nodes, each of which is a row to compute"
    assert said in report.footnotes(record(example("suffix:tree=true")))
    assert said not in report.footnotes(record(example("suffix")))


def test_notes_say_how_intervals_were_found_and_what_was_interrupted() -> None:
    result = example("ngram")
    said = "95% intervals: paired bootstrap over 2 prompts and 1 round, 2000 resamples"
    assert report.footnotes(record(example("suffix", "ngram")))[0] == f"{said}; so few prompts say little about others"
    enough = comparison({"plain": [1.0] * 8, "ngram": [0.9] * 8}, rounds=3)
    assert report.footnotes(record(enough)) == [
        "95% intervals: paired bootstrap over 8 prompts and 3 rounds, 2000 resamples"
    ]
    result.interrupted = True
    result.measured[1].passes[0].complete = False
    result.measured[1].passes[0].answers.pop()
    last = report.footnotes(record(result))[-1]
    assert last == "interrupted: complete passes are counted, and of ngram the 1 of 2 answers that were ready"
    assert "1/1" in printed(report.table(record(result)))


def test_rounds_that_differ_and_a_gain_that_drafting_cannot_make_are_put_down_to_a_busy_machine() -> None:
    forwards = record(example("ngram"))["variants"][1]["forward_speed_up"]
    for factor, busy in ((1.0, False), (1.2, True)):
        times = {"plain": [1.0, 1.0], "ngram": [1 / (factor * forwards)] * 2}
        notes = report.footnotes(record(comparison(times)))
        assert any("the machine was busy" in note for note in notes) == busy
    data = record(comparison({"plain": [1.0] * 8, "ngram": [0.9] * 8}, rounds=3))
    for slowest, busy in ((10.0, False), (13.0, True)):
        data["variants"][0]["seconds"] = [8.0, 9.0, slowest]
        assert any("the machine was busy" in note for note in report.footnotes(data)) == busy


def test_the_verdict_names_the_fastest_only_where_it_is_faster() -> None:
    assert report.verdict(record(example("suffix", "ngram"))).startswith(
        "The fastest was suffix: 2.00× as fast as plain decoding (95% interval 2.00–2.00). "
    )
    slow = comparison({"plain": [1.0, 1.0], "ngram": [1.25, 1.25]})
    assert report.verdict(record(slow)).startswith(
        "Nothing was faster than plain decoding here; ngram lost least, 0.80×"
    )
    unsure = comparison({"plain": [1.0, 1.0], "ngram": [0.5, 1.25]})
    assert "but it cannot be told from plain decoding." in report.verdict(record(unsure))
    assert report.verdict(record(example())) == "Only plain decoding was measured."


def test_a_coloured_answer_is_the_whole_text_with_a_legend_of_what_it_has() -> None:
    (shown,) = record(comparison({"plain": [1.0], "ngram": [1.0]}))["shown"]
    text = printed(report.answer(shown))
    assert TOKENIZER.decode(IDS) in text
    assert "drafted and accepted" in text
    assert "after a draft accepted whole" not in text  # no such token, so no such line
    assert f"{len(IDS)} tokens in {len(IDS) - 3} forwards" in text


def test_an_answer_cannot_steer_the_terminal() -> None:
    (shown,) = record(comparison({"plain": [1.0], "ngram": [1.0]}))["shown"]
    shown["pieces"] = [["a\x1b[2J\x9b2Jb", "plain", None]]
    assert "a␛[2J\ufffd2Jb" in printed(report.answer(shown))
