"""The program itself: its streams, its commands' names, its help, and what it says of trouble with files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli import _is_open, app
from paceline.models import catalog

RUNNER = CliRunner()


def in_shell(command: str) -> tuple[int, str, str]:
    """`paceline` and its redirections, as a shell does them."""
    typed, nothing = f"{sys.executable} -m paceline {command}", subprocess.DEVNULL
    ran = subprocess.run(["bash", "-c", typed], stdin=nothing, capture_output=True, text=True, timeout=120)
    return ran.returncode, ran.stdout, ran.stderr


def test_the_module_is_the_program() -> None:
    assert in_shell("--version") == (0, f"paceline {paceline.__version__}\n", "")


FULL = "the output could not be written: No space left on device\n"


@pytest.mark.parametrize("words", ["--version", "-h", "models"])
def test_a_full_disk_gets_a_sentence(words: str) -> None:
    assert in_shell(f"{words} > /dev/full") == (1, "", FULL)


def test_a_closed_input_or_one_for_errors_is_no_trouble(checkpoint: Path) -> None:
    code, said, told = in_shell(f"generate hello --model {checkpoint} --max-tokens 3 --stats <&- 2>&-")
    assert (code, told) == (0, "") and len(said) > 1


def test_a_stream_that_leads_the_other_way_is_closed(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("")
    with (tmp_path / "script").open() as read, (tmp_path / "log").open("w") as written:
        assert [_is_open(read, "r"), _is_open(written, "w")] == [True, True]
        assert [_is_open(read, "w"), _is_open(written, "r"), _is_open(None, "w")] == [False, False, False]


def test_a_closed_output_gets_a_sentence() -> None:
    code, said, told = in_shell("models >&-")
    assert (code, said) == (1, "")
    assert told.startswith("standard output is closed") and told.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_help_is_shown_when_nothing_or_help_was_asked_for(words: list[str]) -> None:
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: paceline [OPTIONS] COMMAND")
    assert all(
        f"\n  {name} " in result.stdout for name in ("generate", "chat", "serve", "batch", "compare", "sweep", "models")
    )


@pytest.mark.parametrize(
    "command",
    [
        *("generate", "chat", "serve", "batch", "compare", "sweep", "models", "models fetch"),
        *("check", "bench", "bench serve", "bench offline", "bench report"),
    ],
)
def test_help_fits_eighty_columns_and_cuts_no_flag(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = RUNNER.invoke(app, [*command.split(), "-h"]).stdout
    assert max(map(len, told.splitlines())) <= 80
    assert "…" not in told and "<" not in told.replace("<|", "")
    found: Any = app_command(command)
    for option in found.params:
        assert all(flag in told for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--"))


def app_command(path: str) -> Any:
    from typer.main import get_command

    command: Any = get_command(app)
    for name in path.split():
        command = command.commands[name]
    return command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("api_server --port 80", "paceline api_server is called paceline serve here"),
        ("bench latency", "paceline bench latency is called paceline bench offline here"),
        ("benchmark-serving", "paceline benchmark-serving is called paceline bench serve here"),
        ("train", "paceline train is not there yet"),
        ("run-batch -i x", "paceline run-batch is called paceline batch here"),
        ("genrate x", "paceline has no command 'genrate'; did you mean generate?"),
        ("frobnicate", "paceline has no command 'frobnicate'; there are generate, chat, serve, batch,"),
        ("models lst", "paceline models has no command 'lst'; did you mean list?"),
        ("--verison", "no such option: --verison"),
        ("chat hello", "'hello' is one argument too many; see paceline chat --help"),
        ("batch in.jsonl", "missing argument 'OUT.jsonl'; see paceline batch --help"),
        ("generate x --max-tokens few", "--max-tokens few is not allowed; allowed: a whole number"),
        ("generate x --max_new_tokens 1.5", "--max_new_tokens 1.5 is not allowed; allowed: a whole number"),
        ("generate x --temperature warm", "--temperature warm is not allowed; allowed: a number"),
        ("generate x --stop-token-id a", "--stop-token-id a is not allowed; allowed: a whole number"),
        ("compare --rounds x", "--rounds x is not allowed; allowed: a whole number"),
        (
            "generate x --drafter speculators",
            "drafter 'speculators', a drafter in the speculators format, is known",
        ),
        ("generate x --model ~nobody-here/x", "model '~nobody-here/x' was not found"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(words: str, said: str) -> None:
    result = RUNNER.invoke(app, words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1


def test_models_list_is_models() -> None:
    assert RUNNER.invoke(app, ["models", "list"]).stdout == RUNNER.invoke(app, ["models"]).stdout


def test_a_folder_that_cannot_be_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/cache/models")

    monkeypatch.setattr(catalog, "table", refuse)
    result = RUNNER.invoke(app, ["models"])
    assert (result.exit_code, result.stderr) == (1, "/cache/models: Permission denied\n")


@pytest.mark.parametrize(
    ("home", "said"), [("/dev/null", "Not a directory"), ("~nobody-here", "set PACELINE_HOME to a full path")]
)
def test_a_cache_that_cannot_be_used_is_one_line(home: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", home)
    result = RUNNER.invoke(app, ["generate", "hello"])
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_brackets_in_names_are_no_markup(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["generate", "hello", "--model", f"{tmp_path}/[bold]x"])
    assert "[bold]x' was not found" in result.stderr
