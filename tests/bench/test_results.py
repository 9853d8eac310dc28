"""The layout of results: what stands where, and that nothing gets lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import DraftModel, NGram
from paceline.bench import machine, results
from paceline.bench.differences import Difference
from paceline.bench.interval import RESAMPLES
from paceline.bench.measured import Measured
from tests.bench.examples import IDS, TOKENIZER, comparison, example, record


def test_the_record_survives_json_with_all_its_figures(tmp_path: Path) -> None:
    results.write(tmp_path / "deep" / "results.json", record(example("ngram", "suffix")))
    data = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert data == json.loads(json.dumps(record(example("ngram", "suffix")) | {"date": data["date"]}))
    assert data["kind"] == "compare"
    assert data["command"] == "paceline compare"
    assert data["versions"].keys() == {"paceline", "torch", "python"}
    assert data["machine"]["cores"] >= 1 and data["machine"]["load"] >= 0  # a reader sees whether it was busy
    assert data["interval"]["resamples"] == RESAMPLES
    assert data["interrupted"] is False
    plain, ngram, _ = data["variants"]
    assert (plain["drafter"], plain["acceptance"], plain["speed_up"], plain["speed_up_interval"]) == (
        None,
        None,
        1,
        None,
    )
    assert ngram["drafter"] == repr(NGram())
    assert ngram["seconds"] == [1.0]
    assert ngram["speed_up"] == 2.0
    assert ngram["speed_up_interval"] == [2.0, 2.0]
    assert ngram["tokens"] == len(IDS) + 6
    assert ngram["forwards"] == len(IDS) + 6 - 8
    assert ngram["forward_speed_up"] == pytest.approx((len(IDS) + 6) / (len(IDS) - 2))
    assert ngram["proposed_by_position"] == [8, 8, 8, 8, 4, 4]
    assert ngram["acceptance_by_position"] == [0.5, 0.5, 0.5, 0.25, 0.5, 0.0]
    assert (ngram["answered"], ngram["identical"], ngram["complete"]) == (2, 2, True)
    assert ngram["answers"][0]["token_ids"] == IDS
    assert data["prompts"][1] == {"name": "prompt 1", "text": "text 1", "tokens": 2}


def test_every_field_of_the_older_layout_is_still_there() -> None:
    """bench/results has files in it, and docs/figures.py reads both."""
    older = json.loads((Path(__file__).parents[2] / "bench" / "results" / "compare_smollm2.json").read_text())
    newer = record(example("ngram", "suffix"))
    assert older.keys() <= newer.keys()
    assert older["variants"][1].keys() <= newer["variants"][1].keys()
    assert older["variants"][1]["answers"][0].keys() <= newer["variants"][1]["answers"][0].keys()
    assert older["prompts"][0].keys() <= newer["prompts"][0].keys()


def test_the_names_that_scripts_know_hold_texts_ids_and_timings() -> None:
    data = record(example("draft:model=a/b,num_draft_tokens=5", "ngram:max_match=3", "suffix", "ngram"))
    assert data["default"]["texts"] == [TOKENIZER.decode(IDS), TOKENIZER.decode(IDS[:6])]
    assert data["default"]["token_ids"] == [IDS, IDS[:6]]
    assert data["default"]["seconds"] == [[1.5, 0.5]]
    assert data["default"]["total_seconds"] == [2.0]
    assert data["default"]["drafter"] is None
    assert data["speculative"]["drafter"] == repr(DraftModel("a/b"))
    assert data["speculative"]["seconds"] == [[0.75, 0.25]]
    assert data["ngram"]["name"] == "ngram:max_match=3"
    assert data["suffix"]["total_seconds"] == [3.0]
    assert data["drafter ngram"]["name"] == "ngram"  # the second of its kind, where the first has its name
    assert "speculative_reason" not in data and "ngram_reason" not in data


def test_a_name_without_a_run_is_null_and_its_reason_stands_beside_it() -> None:
    data = record(example("suffix"))
    assert data["speculative"] is None
    assert data["speculative_reason"] == "not asked for: no draft model was named"
    assert data["ngram"] is None
    assert data["ngram_reason"] == "not asked for: no n-gram drafter was named"
    cut = example("suffix", "ngram")
    cut.measured.pop()
    assert record(cut)["ngram_reason"] == "interrupted before it had an answer"


def test_a_drafter_cannot_take_the_name_of_another_field() -> None:
    data = record(example("date"))
    assert isinstance(data["date"], str)
    data = record(example("first", "date"))
    assert isinstance(data["date"], str)
    assert data["drafter date"]["total_seconds"] == [2.0]


def test_a_difference_is_recorded_at_its_answer() -> None:
    result = example("ngram", "suffix")
    result.measured[2].differences = [Difference(1, 0, 4, IDS[4], 7, 0.00003)]
    row = record(result)["variants"][2]
    assert row["identical"] == 1
    assert [answer["identical"] for answer in row["answers"]] == [True, False]
    assert row["answers"][0]["difference"] is None
    assert row["answers"][1]["difference"] == {
        "prompt": 1,
        "round": 0,
        "position": 4,
        "expected": IDS[4],
        "got": 7,
        "margin": 0.00003,
    }


def test_a_sweep_has_its_best_length_and_no_names_of_drafters() -> None:
    data = record(comparison({"plain": [1.0, 1.0], "1": [0.9, 0.8], "3": [0.5, 0.5]}), "sweep")
    assert data["kind"] == "sweep"
    assert data["best"]["draft_length"] == 3
    assert data["best"]["speed_up"] == 2.0
    assert data["best"]["speed_up_interval"] == [2.0, 2.0]
    assert "The fastest was a draft length of 3" in data["best"]["verdict"]
    assert [row["draft_length"] for row in data["variants"]] == [None, 1, 3]
    assert not {"default", "speculative", "ngram"} & data.keys()
    assert {item["variant"] for item in data["shown"]} == {"3 drafted"}
    assert "best" not in record(comparison({"plain": [1.0]}), "sweep")


def chosen(measured: list[tuple[Measured, object]]) -> list[tuple[str, int]]:
    return [(one.variant.name, answer.prompt) for one, answer in measured]  # type: ignore[attr-defined]


def test_answers_shown_are_plains_and_owe_most_to_drafts_each_of_another_prompt() -> None:
    result = comparison({"plain": [1.0] * 4, "ngram": [1.0] * 4, "suffix": [1.0] * 4})
    first = results.choose_answers(result)
    assert chosen(first) == [("ngram", 3), ("suffix", 0), ("ngram", 1)]  # five of six tokens, then three of many
    result.measured[1].differences = [Difference(number, 0, 0, 1, 2, None) for number in range(4)]
    assert chosen(results.choose_answers(result)) == [("suffix", 3), ("suffix", 0), ("suffix", 1)]
    result.measured[2].differences = result.measured[1].differences
    assert results.choose_answers(result) == []


def test_the_pieces_of_a_shown_answer_are_its_text_with_their_origins() -> None:
    shown = record(comparison({"plain": [1.0], "ngram": [1.0]}))["shown"]
    (item,) = shown
    assert "".join(text for text, _, _ in item["pieces"]) == TOKENIZER.decode(IDS)
    drafted = [text for text, kind, drafter in item["pieces"] if (kind, drafter) == ("accepted", "x")]
    assert "".join(drafted) == TOKENIZER.decode(IDS[:3])
    assert (item["prompt"], item["variant"], item["tokens"], item["cut"]) == ("prompt 0", "ngram", len(IDS), False)


@pytest.mark.parametrize("most", [5, 160])
def test_a_shown_answer_is_no_longer_than_the_text_that_a_stop_left(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    result = comparison({"plain": [1.0], "ngram": [1.0]})
    output = result.measured[1].passes[0].answers[0].output
    output.text = TOKENIZER.decode(IDS[:3])[:-1]
    monkeypatch.setattr(results, "MAX_PIECES", most)
    (item,) = record(result)["shown"]
    assert "".join(text for text, _, _ in item["pieces"]) == output.text
    assert [kind for _, kind, _ in item["pieces"]] == ["accepted"] * 3


def test_a_long_answer_is_cut_and_without_a_tokenizer_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    result = comparison({"plain": [1.0], "ngram": [1.0]})
    assert results.record("compare", result, None, "", {})["shown"] == []
    monkeypatch.setattr(results, "MAX_PIECES", 5)
    (item,) = record(result)["shown"]
    assert item["cut"]
    assert "".join(text for text, _, _ in item["pieces"]) == TOKENIZER.decode(IDS[:5])


def test_lists_of_numbers_are_written_on_one_line_and_strings_are_left_alone(tmp_path: Path) -> None:
    data = {
        "ids": [1, 2, 3],
        "seconds": [[0.5, 1e-07], [-2.0]],
        "text": "[\n  1,\n  2\n ]",
        "none": [],
        "mixed": [1, "a"],
    }
    results.write(tmp_path / "x.json", data)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == data
    assert '"ids": [1, 2, 3]' in text
    assert "[0.5, 1e-07]" in text


def test_the_record_of_the_machine_names_versions_and_revision() -> None:
    found = machine.record()
    assert found["versions"]["paceline"] == results.machine.paceline.__version__
    assert found["revision"] is None or len(found["revision"].rstrip("+")) == 40
