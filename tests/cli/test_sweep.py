"""`paceline sweep`, from options to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from paceline import DraftModel, NGram, SamplingParams, Suffix
from paceline.bench import compare as bench
from paceline.bench.measured import Pass, Plan
from paceline.cli import sweep as command
from paceline.llm import LLM
from tests.cli import measured
from tests.cli.measured import ROWS, read


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return measured.write_rows(tmp_path / "rows.jsonl")


def run(checkpoint: Path, folder: Path, *words: str) -> Result:
    return measured.run("sweep", checkpoint, folder, *words)


def test_lmflows_experiment_in_lmflows_words(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    words = ["--draft_model", str(checkpoint), "--gamma", "1..3", "--temperature", "0.", "--max_new_tokens", "12"]
    result = run(checkpoint, tmp_path / "out", *words, "--dataset-path", str(dataset), "--ignore-eos", "--rounds", "2")
    assert result.exit_code == 0, result.output
    data = read(tmp_path / "out")
    assert data["kind"] == "sweep"
    assert [row["draft_length"] for row in data["variants"]] == [None, 1, 2, 3]
    assert [len(row["seconds"]) for row in data["variants"]] == [2, 2, 2, 2]  # plain once in every round
    assert data["variants"][3]["drafter"] == repr(DraftModel(str(checkpoint), 3))
    assert [row["identical"] for row in data["variants"]] == [3] * 4
    assert [len(answer["token_ids"]) for answer in data["variants"][0]["answers"]] == [12] * 3
    for length, row in enumerate(data["variants"][1:], start=1):
        assert row["acceptance"] == 1.0  # it drafts for itself
        assert row["forwards"] == 3 * (1 + -(-11 // (1 + length)))  # the prompt's forward says one token
        assert row["forward_speed_up"] == pytest.approx(36 / row["forwards"])
        assert len(row["acceptance_by_position"]) == length
        assert row["repeated_4grams"] == data["variants"][0]["repeated_4grams"]
    assert data["best"]["draft_length"] in (1, 2, 3)
    assert not (tmp_path / "out" / "compare.svg").exists()
    rows = [line.split() for line in result.stdout.splitlines() if "×" in line and "/3" in line]
    assert [row[0] for row in rows] == ["plain", "1", "2", "3"]
    assert data["best"]["verdict"] in " ".join(result.stdout.split())
    assert f"report: {tmp_path / 'out' / 'report.html'}" in result.stdout
    assert "by draft length" in (tmp_path / "out" / "report.html").read_text()


def test_the_draft_model_is_read_once_for_all_lengths_and_rounds(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.models import loader

    seen: list[Any] = []
    real = loader.build
    monkeypatch.setattr(loader, "build", lambda *given, **named: (seen.append(given), real(*given, **named))[1])
    words = ["--draft-model", str(checkpoint), "--gamma", "1,2", "--max-tokens", "4", "--rounds", "2"]
    assert run(checkpoint, tmp_path, *words, "--dataset-path", str(dataset)).exit_code == 0
    assert len(seen) == 2  # the target and the draft model


@pytest.mark.parametrize("name", ["run,seed=1", "run:seed=1", "a,b:c=d"])
def test_a_draft_model_may_have_any_path(
    checkpoint: Path, dataset: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    words = ["--draft_model", f"./{name}", "--gamma", "2", "--max-tokens", "4", "--num-prompts", "1"]
    result = run(checkpoint, tmp_path / "out", *words, "--dataset-path", str(dataset))
    assert (result.exit_code, result.stderr) == (0, "")
    assert read(tmp_path / "out")["variants"][1]["drafter"] == repr(DraftModel(f"./{name}", 2))


def test_a_draft_model_is_packed_under_every_name_of_the_option(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--draft_model", str(checkpoint), "--draft_model_quant_type", "weight_only_int8", "--gamma", "2"]
    result = run(checkpoint, tmp_path, *words, "--max-tokens", "4", "--dataset-path", str(dataset))
    assert (result.exit_code, result.stderr) == (0, "")
    assert read(tmp_path)["variants"][1]["drafter"] == repr(DraftModel(str(checkpoint), 2, quantization="int8"))


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("suffix", lambda length: Suffix(length)),
        ("ngram:max_match=3,min_match=1", lambda length: NGram(length, 1, 3)),
        (None, lambda length: NGram(length)),
    ],
)
def test_other_drafters_are_swept_by_their_length(
    checkpoint: Path, dataset: Path, tmp_path: Path, spec: str | None, config: Any
) -> None:
    words = [] if spec is None else ["--drafter", spec]
    words += ["--num-draft-tokens", "2,5", "--max-tokens", "20", "--dataset-path", str(dataset), "--num-prompts", "2"]
    result = run(checkpoint, tmp_path, *words)
    assert result.exit_code == 0, result.output
    assert [row["drafter"] for row in read(tmp_path)["variants"]] == [None, repr(config(2)), repr(config(5))]
    assert [row["identical"] for row in read(tmp_path)["variants"]] == [2, 2, 2]


def test_the_answers_are_what_the_model_says_and_end_at_the_stop_token(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    llm, asked = LLM(str(checkpoint)), [[{"role": "user", "content": row}] for row in ROWS]
    first = llm.chat(asked, SamplingParams(temperature=0.7, seed=5, max_tokens=40))[0].outputs[0].token_ids
    stop = first[20]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, stop_token_ids=[stop])
    expected = [output.outputs[0].token_ids for output in llm.chat(asked, params)]
    assert expected[0] == first[: first.index(stop) + 1]
    words = ["--temperature", "0.7", "--seed", "5", "--max-tokens", "40", "--gamma", "3", "--stop-token-id", str(stop)]
    run(checkpoint, tmp_path, *words, "--dataset-path", str(dataset))
    for row in read(tmp_path)["variants"]:
        assert [answer["token_ids"] for answer in row["answers"]] == expected


def test_of_a_dataset_a_hundred_prompts_are_asked_unless_told_otherwise(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(command.measuring, "run", lambda *given: asked.append(len(given[3])))
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"prompt": "x"}) + "\n") * 130)
    run(checkpoint, tmp_path, "--dataset-path", str(path))
    run(checkpoint, tmp_path, "--dataset-path", str(path), "--num-prompts", "120")
    run(checkpoint, tmp_path)
    run(checkpoint, tmp_path, "--demo", "chat")
    assert asked == [100, 120, 10, 8]


def test_an_interrupt_keeps_the_lengths_that_were_measured(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.run_prompts

    def interrupted(llm: LLM, plan: Plan, numbers: Any, on_done: Any) -> Pass:
        drafter = llm.engine.drafter
        if drafter is not None and drafter.max_nodes == 3 and plan.params.max_tokens > 8:  # not in the warm-up
            raise KeyboardInterrupt
        return real(llm, plan, numbers, on_done)

    monkeypatch.setattr(bench, "run_prompts", interrupted)
    result = run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--max-tokens", "10", "--gamma", "1..4")
    assert result.exit_code == 130
    assert [row["draft_length"] for row in read(tmp_path)["variants"]] == [None, 1, 2]
    assert read(tmp_path)["best"]["draft_length"] in (1, 2)
    assert "interrupted" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gamma", "0..3"], "draft lengths '0..3' are not allowed; allowed: numbers of 1 or more"),
        (["--num-draft-tokens", "1..64,70..133"], "draft lengths '1..64,70..133' are too many; at most 64 are run"),
        (["--gamma", "1..900"], "draft lengths '1..900' are too many; at most 64 are run"),
        (["--drafter", "none"], "has no num_draft_tokens to sweep"),
        (["--drafter", "ngram", "--draft-model", "m"], "--draft-model and --drafter were both given; give one"),
        (["--drafter", "ngram:num_draft_tokens=4"], "which is what is swept; give the lengths as --num-draft-tokens 4"),
        (["--max-new-tokens", "0"], "--max-tokens 0 is not allowed"),
        (["--rounds", "0"], "--rounds 0 is not allowed"),
        (["--output", "/dev/null/x"], "the output folder /dev/null/x cannot be made"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    checkpoint: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    result = run(checkpoint, tmp_path, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
