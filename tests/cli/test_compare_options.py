"""`paceline compare`: which drafters and prompts its options mean, and what scripts find in its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from paceline import DraftModel, NGram, Suffix
from paceline.bench.prompts import DEMOS, read_questions
from tests.cli import measured
from tests.cli.measured import read


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return measured.write_rows(tmp_path / "rows.jsonl")


def run(checkpoint: Path, folder: Path, *words: str) -> Result:
    return measured.run("compare", checkpoint, folder, *words)


def test_a_draft_model_and_ngram_are_compared_under_the_names_that_scripts_know(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--speculative-model", str(checkpoint), "--num_speculative_tokens", "3", "--ngram-prompt-lookup-max", "2"]
    saved = tmp_path / "saved" / "inference_results_with_speculative.json"
    result = run(checkpoint, tmp_path, *words, "--dataset-path", str(dataset), "--save-output", str(saved))
    assert result.exit_code == 0, result.output
    data = json.loads(saved.read_text())
    assert data == read(tmp_path)
    assert f"also written: {tmp_path / 'results.json'}, {tmp_path / 'compare.svg'}, {saved}" in result.stdout
    assert [row["label"] for row in data["variants"]] == ["plain", "tiny", "ngram"]
    assert data["variants"][1]["drafter"] == repr(DraftModel(str(checkpoint), 3))
    assert data["variants"][2]["drafter"] == repr(NGram(3, 1, 2))
    assert data["variants"][1]["acceptance"] == 1.0  # it drafts for itself
    for name in ("default", "speculative", "ngram"):
        assert data[name]["token_ids"] == data["default"]["token_ids"]
        assert data[name]["texts"] == data["default"]["texts"]
        assert [len(row) for row in data[name]["seconds"]] == [3]
        assert sum(data[name]["seconds"][0]) <= data[name]["total_seconds"][0]


def test_what_was_not_compared_is_null_with_its_reason(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--drafter", "suffix")
    data = read(tmp_path)
    assert data["speculative"] is None and data["ngram"] is None
    assert data["speculative_reason"].startswith("not asked for")
    assert data["ngram_reason"].startswith("not asked for")
    assert data["suffix"]["texts"] == data["default"]["texts"]


def test_ngram_in_place_of_a_draft_model_means_ngram_alone(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--speculative-model", "[ngram]")
    assert [row["label"] for row in read(tmp_path)["variants"]] == ["plain", "ngram"]


def test_flags_without_effect_say_so_and_so_do_those_that_do_not_apply(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--dataset-path", str(dataset), "--num-prompts", "1", "--max-tokens", "4", "--drafter", "ngram"]
    result = run(checkpoint, tmp_path / "quiet", *words)
    assert result.exit_code == 0
    assert result.stderr == ""
    more = ["--disable-log-stats", "--use_v2_block_manager", "--drafter-quantization", "int8"]
    said = run(checkpoint, tmp_path, *words, *more).stderr
    assert "--disable-log-stats has no effect here" in said
    assert "--use_v2_block_manager has no effect here" in said
    assert "a draft model's quantization int8 has no effect: no draft model was given" in said
    assert len(said.strip().splitlines()) == 3


FEW = ["--num-prompts", "1", "--max-tokens", "4"]


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        (["ngram"], [NGram(5, 1, 4)]),
        (["ngram:min_match=2", "suffix"], [NGram(5, 2, 4), Suffix()]),
        (["ngram:rule=reference,num_draft_tokens=3"], [NGram(3, 1, 4, "reference")]),
    ],
)
def test_the_length_of_a_match_reaches_ngram_wherever_it_is_named(
    checkpoint: Path, dataset: Path, tmp_path: Path, drafters: list[str], expected: list[Any]
) -> None:
    words = [word for spec in drafters for word in ("--drafter", spec)]
    result = run(checkpoint, tmp_path, *words, *FEW, "--ngram_prompt_lookup_max", "4", "--dataset-path", str(dataset))
    assert (result.exit_code, result.stderr) == (0, "")
    assert [row["drafter"] for row in read(tmp_path)["variants"]][1:] == [repr(config) for config in expected]


def test_the_length_of_a_match_is_noticed_where_nothing_is_matched(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--drafter", "suffix", "--dataset-path", str(dataset), "--ngram_prompt_lookup_max", "4"]
    said = run(checkpoint, tmp_path, *FEW, *words).stderr
    assert said == "note: a match of at most 4 tokens applies to none of these drafters and is left out\n"


@pytest.mark.parametrize("flag", ["--num-speculative-tokens", "--num_draft_tokens", "--gamma"])
def test_a_draft_length_reaches_every_drafter_of_ours(
    checkpoint: Path, dataset: Path, tmp_path: Path, flag: str
) -> None:
    run(checkpoint, tmp_path, *FEW, "--dataset-path", str(dataset), flag, "3")
    assert [row["drafter"] for row in read(tmp_path)["variants"]][1:] == [repr(NGram(3)), repr(Suffix(3))]
    assert [row["label"] for row in read(tmp_path)["variants"]] == ["plain", "ngram", "suffix"]


def test_a_draft_model_is_packed_under_every_name_of_the_option(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--speculative-model", str(checkpoint), "--speculative-model-quantization", "int8"]
    result = run(checkpoint, tmp_path, *FEW, *words, "--dataset-path", str(dataset))
    assert (result.exit_code, result.stderr) == (0, "")
    assert read(tmp_path)["variants"][1]["drafter"] == repr(DraftModel(str(checkpoint), quantization="int8"))


def test_a_number_of_speculative_tokens_is_for_drafters_that_have_none_of_their_own(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    drafters = ["--drafter", "ngram", "--drafter", "suffix:num_draft_tokens=7"]
    words = ["--dataset-path", str(dataset), "--num-prompts", "1", "--max-tokens", "4", *drafters]
    run(checkpoint, tmp_path / "first", *words)
    assert [row["drafter"] for row in read(tmp_path / "first")["variants"]][1:] == [repr(NGram()), repr(Suffix(7))]
    run(checkpoint, tmp_path, *words, "--num-speculative-tokens", "2")
    assert [row["drafter"] for row in read(tmp_path)["variants"]][1:] == [repr(NGram(2)), repr(Suffix(7))]


@pytest.mark.parametrize("demo", DEMOS)
def test_each_demo_asks_its_own_prompts(checkpoint: Path, tmp_path: Path, demo: str) -> None:
    result = run(checkpoint, tmp_path, "--demo", demo, "--num-prompts", "2", "--max-tokens", "3", "--drafter", "ngram")
    assert result.exit_code == 0, result.output
    asked, questions = read(tmp_path)["prompts"], read_questions(None, 2, demo)
    assert [prompt["name"] for prompt in asked] == [question.name for question in questions]
    for prompt, question in zip(asked, questions):
        assert all(message["content"] in prompt["text"] for message in question.messages)


def test_a_conversation_needs_a_template_and_a_named_one_will_do(without_template: Path, tmp_path: Path) -> None:
    words = ["--demo", "chat", "--num-prompts", "1", "--max-tokens", "3", "--drafter", "ngram"]
    result = run(without_template, tmp_path, *words)
    assert result.exit_code == 2
    assert "is a conversation, but" in result.stderr and "has no chat template; give --template vicuna" in result.stderr
    assert run(without_template, tmp_path, *words, "--template", "vicuna").exit_code == 0
    assert "ASSISTANT:" in read(tmp_path)["prompts"][0]["text"]


def test_the_end_may_be_ignored(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--ignore-eos", "--drafter", "ngram")
    assert [len(ids) for ids in read(tmp_path)["default"]["token_ids"]] == [20, 20, 20]
