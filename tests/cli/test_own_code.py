"""A checkpoint with code of its own on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.cli import app
from tests.models import own_code
from tests.tokens import tokenizer

RUNNER = CliRunner()
TEXT = "the rider in front"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_code.keep_apart(monkeypatch, tmp_path / "modules")
    folder = own_code.write(tmp_path / "own", len(tokenizer()))
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--trust_remote_code"])
def test_its_code_is_run_with_the_flag_and_not_without(own: Path, flag: str) -> None:
    words = ["generate", "--model", str(own), "--max-tokens", "6", "--raw", TEXT]
    refused = RUNNER.invoke(app, words)
    assert refused.exit_code != 0 and "--trust-remote-code" in refused.stderr and refused.stderr.count("\n") == 1
    assert not (own / "was-run").exists()
    said = RUNNER.invoke(app, [*words, flag, "--drafter", "ngram"])
    assert said.exit_code == 0, said.output
    assert "the fallback" in said.stderr
    plain = LLM(str(own), trust_remote_code=True).generate(TEXT, SamplingParams(temperature=0.0, max_tokens=6))
    assert said.stdout == plain[0].outputs[0].text + "\n"
