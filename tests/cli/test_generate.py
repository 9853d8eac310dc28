"""`paceline generate`, and what all commands share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.llm import LLM as Target

RUNNER = CliRunner()
TEXT = "the rider in front and the rider behind"


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint))


def expected(llm: LLM, chat: bool = True, **params: object) -> str:
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})  # type: ignore[arg-type]
    if chat:
        return llm.chat([{"role": "user", "content": TEXT}], chosen)[0].outputs[0].text
    return llm.generate(TEXT, chosen)[0].outputs[0].text


def run(checkpoint: Path, *words: str, given: str | None = None) -> str:
    result = RUNNER.invoke(app, ["generate", "--model", str(checkpoint), "--max-tokens", "12", *words], input=given)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_prompt_may_be_an_argument_a_file_or_standard_input(llm: LLM, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    text = expected(llm) + "\n"
    assert len(text) > 5
    assert run(checkpoint, TEXT) == text
    assert run(checkpoint, "--file", str(tmp_path / "prompt.txt")) == text
    assert run(checkpoint, given=TEXT) == text
    assert run(checkpoint, "-", given=TEXT) == text


def test_raw_leaves_the_template_out(llm: LLM, checkpoint: Path) -> None:
    raw = expected(llm, chat=False) + "\n"
    assert raw != expected(llm) + "\n"
    assert run(checkpoint, TEXT, "--raw") == raw
    assert run(checkpoint, TEXT, "--chat") == expected(llm) + "\n"


def test_a_model_without_template_completes_the_text_as_it_is(without_template: Path) -> None:
    text = LLM(str(without_template)).generate(TEXT, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text
    assert run(without_template, TEXT) == text + "\n"
    result = RUNNER.invoke(app, ["generate", TEXT, "--model", str(without_template), "--chat"])
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_sampling_options_reach_the_sampler(llm: LLM, checkpoint: Path) -> None:
    words = ("--temperature", "0.9", "--top-p", "0.8", "--top-k", "20", "--seed", "7")
    text = expected(llm, temperature=0.9, top_p=0.8, top_k=20, seed=7)
    assert run(checkpoint, TEXT, *words) == text + "\n"
    assert text != expected(llm)


def test_drafters_change_the_forwards_and_not_the_text(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    real = Target.set_drafter
    monkeypatch.setattr(Target, "set_drafter", lambda self, drafter: (built.append(drafter), real(self, drafter))[1])
    text = expected(llm) + "\n"
    assert run(checkpoint, TEXT, "--drafter", "none") == text
    assert run(checkpoint, TEXT, "--drafter", "suffix", "--drafter", "ngram", "--num-draft-tokens", "3") == text
    assert run(checkpoint, TEXT, "--drafter", str(checkpoint)) == text
    none, both, model = built
    assert none is None
    assert both.configs == [paceline.Suffix(3), paceline.NGram(3)]  # type: ignore[attr-defined]
    assert model == paceline.DraftModel(str(checkpoint))


def test_stats_go_to_standard_error(checkpoint: Path) -> None:
    result = RUNNER.invoke(
        app, f"generate '{TEXT}' --model {checkpoint} --max-tokens 12 --drafter {checkpoint} --stats"
    )
    assert "12 tokens in" in result.stderr
    # The prompt's forward gives 1 token, five drafts and a bonus 6, and with room for 5 the last gives 4 and its own.
    assert "3 target forwards, 4.00 tokens per forward, 100% of drafts accepted" in result.stderr
    assert "target forwards" not in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["x", "--max-tokens", "0"], "max_tokens=0 is not allowed"),
        (["x", "--top-p", "2"], "top_p=2.0 is not allowed"),
        (["x", "--drafter", "ngram:max_mach=3"], "did you mean 'max_match'?"),
        (["x", "--drafter", "none", "--drafter", "ngram"], "--drafter none cannot stand beside another"),
        (["x", "--drafter", "no-such-model"], "model 'no-such-model' was not found"),
        (["x", "--model", "no-such-model"], "model 'no-such-model' was not found"),
        (["x", "--dtype", "int3"], "dtype='int3' is not known"),
        (["x", "--device", "abacus"], "device='abacus' cannot be used"),
        (["x", "--file", "y"], "a prompt and --file were both given"),
        (["--file", "no-such-file"], "no-such-file cannot be read: No such file"),
        (["", "--raw"], "the prompt is empty"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(checkpoint: Path, words: list[str], said: str) -> None:
    result = RUNNER.invoke(app, ["generate", "--model", str(checkpoint), *words])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_errors_are_red(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = RUNNER.invoke(app, ["generate", "x", "--model", str(checkpoint), "--top-p", "2"], color=True)
    assert "\x1b[31mtop_p=2.0" in result.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    result = RUNNER.invoke(app, ["generate", "x", "--tempratur", "0"])
    assert result.exit_code == 2
    assert "--tempratur" in result.stderr


def test_an_interrupt_ends_quietly_after_what_was_written(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = Target.step, 0

    def interrupted(self: LLM) -> Any:
        nonlocal steps
        steps += 1
        if steps > 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Target, "step", interrupted)
    result = RUNNER.invoke(app, ["generate", TEXT, "--model", str(checkpoint)])
    assert (result.exit_code, result.stderr) == (130, "")
    monkeypatch.undo()
    assert result.stdout.endswith("\n")
    assert expected(llm).startswith(result.stdout.removesuffix("\n"))


def test_version_is_told() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"paceline {paceline.__version__}\n")


def test_neither_the_package_nor_the_command_line_imports_what_it_does_not_need_yet() -> None:
    code = (
        "import sys, paceline\n"
        "assert not {'typer', 'matplotlib', 'torch', 'rich'} & sys.modules.keys()\n"
        "import paceline.cli\n"
        "assert not {'matplotlib', 'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
