"""`paceline models`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.models import catalog, fetch
from paceline.models.catalog import ALIASES, DEFAULT_MODEL, Alias

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def deliver(alias: Alias, target: Path, progress: bool) -> None:
    """A file of the right size that takes no room."""
    with target.open("wb") as out:
        out.truncate(alias.size_bytes)


def test_the_list_names_every_model_and_marks_the_default() -> None:
    result = RUNNER.invoke(app, ["models"])
    assert result.exit_code == 0
    for name in ALIASES:
        assert name in result.stdout
    assert f"{DEFAULT_MODEL} (default)" in result.stdout


def test_a_model_is_fetched_and_removed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "deliver", deliver)
    fetched = RUNNER.invoke(app, ["models", "fetch", DEFAULT_MODEL])
    assert fetched.exit_code == 0, fetched.output
    path = catalog.cached_path(DEFAULT_MODEL)
    assert path is not None
    assert fetched.stdout == f"{path}\n"
    assert RUNNER.invoke(app, ["models", "remove", DEFAULT_MODEL]).stdout == f"{DEFAULT_MODEL} was removed\n"
    assert catalog.cached_path(DEFAULT_MODEL) is None
    assert RUNNER.invoke(app, ["models", "remove", DEFAULT_MODEL]).stdout == f"{DEFAULT_MODEL} was not in the cache\n"


@pytest.mark.parametrize("command", ["fetch", "remove"])
def test_an_unknown_model_is_refused_in_one_sentence(command: str) -> None:
    result = RUNNER.invoke(app, ["models", command, "no-such-model"])
    assert result.exit_code == 2
    assert result.stderr.startswith("'no-such-model' is not a known model: ")
    assert len(result.stderr.strip().splitlines()) == 1
