"""`paceline check`, from options to exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.bench import compare as bench
from paceline.bench.measured import Pass, Plan
from paceline.cli import app
from paceline.llm import LLM
from tests.cli import measured

FEW = ["--num-prompts", "2", "--max-tokens", "12"]


def run(checkpoint: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["check", "--model", str(checkpoint), *FEW, *words])


def test_a_drafter_that_changes_nothing_passes(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = run(checkpoint, "--drafter", str(checkpoint), "--save-result", str(file))
    assert result.exit_code == 0, result.output
    assert "greedy: 2 of 2 answers (24 tokens) are plain decoding's, token for token;" in result.stdout
    assert "seeded: 2 of 2 answers" in result.stdout
    assert "The text is the same with and without drafts." in result.stdout
    data: dict[str, Any] = json.loads(file.read_text())
    assert data["kind"] == "check" and data["same"] is True and data["distribution"] is None
    assert [one["setting"] for one in data["exact"]] == ["greedy", "seeded"]
    assert {"command", "versions", "machine", "revision", "options"} <= data.keys()


def test_a_changed_token_is_shown_and_the_status_is_1(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.run_prompts

    def faulty(llm: LLM, plan: Plan, numbers: Any, on_done: Any) -> Pass:
        done = real(llm, plan, numbers, on_done)
        for answer in done.answers:
            if llm.engine.drafter is not None and answer.prompt == 1:
                answer.output.token_ids[3] += 1
        return done

    monkeypatch.setattr(bench, "run_prompts", faulty)
    result = run(checkpoint, "--drafter", str(checkpoint), "--temperature", "0")
    assert result.exit_code == 1, result.output
    assert "greedy: 1 of 2 answers" in result.stdout and "seeded" not in result.stdout
    assert ", token 4: " in result.stdout and " apart there" in result.stdout
    assert "The text is NOT the same with drafts." in result.stdout


def test_another_rule_is_checked_by_distribution(checkpoint: Path, tmp_path: Path) -> None:
    words = ["--acceptance", "rejection", "--drafter", str(checkpoint), "--temperature", "0.5", "--top-k", "5"]
    sizes = ["--contexts", "1", "--samples", "160", "--depth", "2"]
    rows = measured.write_rows(tmp_path / "rows.jsonl")
    result = run(checkpoint, *words, *sizes, "--dataset-path", str(rows))
    assert result.exit_code == 0, result.output
    assert "rejection: 160 samples after 1 texts, 160 tokens in" in result.stdout
    assert "would have been found 99 times in 100" in result.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--drafter", "none"], "there is nothing to check; name a drafter"),
        (["--save-result", "found.txt"], "give the name of a new file that ends in .json"),
        (["--samples", "0"], "--samples 0 is not allowed; allowed: 1 or more"),
        (["--acceptance", "maybe"], "is not known; allowed: exact, rejection, block, typical"),
    ],
)
def test_what_cannot_be_checked_is_wrong_usage(checkpoint: Path, words: list[str], sentence: str) -> None:
    result = run(checkpoint, *words)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
