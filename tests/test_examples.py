"""Every file in examples/ runs on a tiny checkpoint, or is refused with the sentence a user would see.

Scripts run in this process. A .sh file is read by bash itself, with a `paceline` that only notes its words; then those
words are given to the command line in this process, which saves the start of a process for each.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import PacelineError
from tests.cli.checkpoints import make_tokenizer, write_checkpoint
from tests.drafters.mtp_models import write_apart, write_whole
from tests.drafters.tiny_medusa import vicuna_heads
from tests.drafters.tiny_mlp import accelerator
from tests.drafters.tiny_readers import glide_state, write_glide

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
RUNNER = CliRunner()

# What a later issue brings, and the sentence that is said until then; pages show it from the same file.
REFUSED: dict[str, str] = json.loads((FOLDER / "refused.json").read_text(encoding="utf-8"))
# One file for each command or script in these systems' manuals.
MANUALS = {
    "vllm": {"draft_model.py", "ngram.py", "mlp_speculator.py"},
    "lmflow": {"speculative_inference.sh", "interactive.sh", "draft_length_table.sh"},
    "colossal_inference": {"unchanged.py", "draft_model.py", "glide.py"},
    "paddlenlp": {"inference_with_reference.sh", "mtp.sh"},
}


def deepseek_with_module(folder: Path) -> tuple[str, str]:
    """A tiny DeepSeek, and its module apart from it."""
    whole = write_whole(folder / "whole", "deepseek_wide", 0)
    make_tokenizer().save_pretrained(whole)
    return whole, write_apart(folder / "module", "deepseek_wide", 1)


HEADS = {  # scripts whose second argument is a drafter with weights
    "medusa.py": lambda: vicuna_heads(len(make_tokenizer())),
    "vllm/mlp_speculator.py": lambda: accelerator(len(make_tokenizer())),
}
PAIRS = {"paddlenlp/mtp.sh": deepseek_with_module}  # commands that have a model and a drafter of their own
SMALL = {"GAMMA": "1..2", "MAX_TOKENS": "6", "NUM_PROMPTS": "1"}  # for the table of draft lengths
NOTE = """#!{python}
import json, os, sys
with open(os.environ["NOTED"], "a", encoding="utf-8") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


SCRIPTS = sorted(path for path in FOLDER.rglob("*.py"))
SHELL = sorted(path for path in FOLDER.rglob("*.sh"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("examples") / "tiny")
    write_glide(folder.parent / "glide", state=glide_state(vocab=len(make_tokenizer())))
    return folder


def run_script(path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny random model in place of the default; some take a second one, or a drafter for it."""
    name = name_of(path)
    second = HEADS[name]() if name in HEADS else checkpoint.parent / "glide" if path.name == "glide.py" else checkpoint
    monkeypatch.setattr(sys, "argv", [str(path), str(checkpoint), str(second)])
    runpy.run_path(str(path), run_name="__main__")


def words_of(path: Path, folder: Path, *arguments: str) -> list[list[str]]:
    """The words with which a .sh file calls `paceline`, a list for each call, as bash reads it."""
    stub, noted = folder / "paceline", folder / "noted.jsonl"
    stub.write_text(NOTE.format(python=sys.executable), encoding="utf-8")
    stub.chmod(0o755)
    place = {**os.environ, **SMALL, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "NOTED": str(noted)}
    subprocess.run(["bash", str(path), *arguments], env=place, check=True, stdin=subprocess.DEVNULL)
    return [json.loads(line) for line in noted.read_text(encoding="utf-8").splitlines()]


# Scripts


@pytest.mark.parametrize("path", [path for path in SCRIPTS if name_of(path) not in REFUSED], ids=name_of)
def test_every_script_runs(
    path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(path, checkpoint, monkeypatch)
    shown = capsys.readouterr().out.strip()
    assert shown
    if path.parent.name == "vllm":  # in our words and in theirs: the same text
        told = dict(re.findall(r"^(ours|newer|older): (.+)$", shown, flags=re.MULTILINE))
        assert len(told) == 3 and len(set(told.values())) == 1
    if name_of(path) == "colossal_inference/unchanged.py":
        assert shown.endswith("the same without the drafter: True")
    if name_of(path) == "colossal_inference/draft_model.py":
        counts = re.findall(r"^(with|without) the drafter: (\d+) tokens in (\d+) forwards$", shown, re.MULTILINE)
        (_, tokens, rounds), (_, plain_tokens, plain_rounds) = counts
        assert tokens == plain_tokens == plain_rounds and int(rounds) < int(tokens)


@pytest.mark.parametrize("path", [path for path in SCRIPTS if name_of(path) in REFUSED], ids=name_of)
def test_a_script_for_what_is_not_there_yet_says_so(
    path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PacelineError) as caught:
        run_script(path, checkpoint, monkeypatch)
    assert str(caught.value) == REFUSED[name_of(path)]


# Commands


@pytest.mark.parametrize("path", [path for path in SHELL if name_of(path) not in REFUSED], ids=name_of)
def test_every_command_runs(path: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file gives a command in another system's words and then in ours, both write the same."""
    own = PAIRS.get(name_of(path))
    calls = words_of(path, tmp_path, *([str(checkpoint)] if own is None else own(tmp_path)))
    monkeypatch.chdir(tmp_path)
    written = []
    for words in calls:
        result = RUNNER.invoke(app, words, input="the rider in front\n")
        assert result.exit_code == 0, result.output
        written.append(result.stdout)
    assert all(text.strip() for text in written)
    assert len(set(written)) == 1


@pytest.mark.parametrize("path", [path for path in SHELL if name_of(path) in REFUSED], ids=name_of)
def test_a_command_for_what_is_not_there_yet_says_so(path: Path, checkpoint: Path, tmp_path: Path) -> None:
    for words in words_of(path, tmp_path, str(checkpoint)):
        result = RUNNER.invoke(app, words)
        assert result.exit_code == 2
        assert REFUSED[name_of(path)] in result.stderr.splitlines()


# All of them


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_a_command_without_arguments_takes_the_default_model(path: Path, tmp_path: Path) -> None:
    for words in words_of(path, tmp_path):
        model = re.search(r"--model(?:_name_or_path)? (\S+)", " ".join(words))
        assert model is not None and model[1] == "smollm2-135m"


def test_every_manual_has_its_files() -> None:
    for system, names in MANUALS.items():
        assert {path.name for path in (FOLDER / system).iterdir() if path.suffix in (".py", ".sh")} == names
    assert set(REFUSED) <= {name_of(path) for path in [*SCRIPTS, *SHELL]}
