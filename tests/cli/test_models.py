"""`paceline models`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import FetchError
from paceline.models import catalog, fetch
from paceline.models.catalog import ALIASES, DEFAULT_MODEL, Alias

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def deliver(alias: Alias, target: Path, progress: bool) -> None:
    """A file of the right size that takes no room."""
    with target.open("wb") as out:
        out.truncate(alias.size_bytes)


def test_the_list_names_every_model_and_marks_the_default() -> None:
    result = RUNNER.invoke(app, ["models"])
    assert result.exit_code == 0
    for name, alias in ALIASES.items():
        assert name in result.stdout
        assert alias.licence in result.stdout
        assert alias.description in result.stdout
    assert f"{DEFAULT_MODEL} (default)" in result.stdout


def test_the_list_fits_eighty_columns_but_for_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = RUNNER.invoke(app, ["models"]).stdout.splitlines()
    assert max(len(line.rstrip()) for line in listed if "PACELINE_HOME" not in line) <= 80


def test_a_fetch_checks_the_file_and_brings_a_damaged_one_anew(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    small = replace(ALIASES[DEFAULT_MODEL], size_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setitem(ALIASES, DEFAULT_MODEL, small)
    path = catalog.home_of(small) / small.filename
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUX")
    refused = RUNNER.invoke(app, ["generate", "hello"])
    assert refused.exit_code == 2
    assert f"{path} is damaged" in refused.stderr and f"type paceline models fetch {DEFAULT_MODEL}" in refused.stderr
    monkeypatch.setattr(fetch, "deliver", lambda alias, target, progress: target.write_bytes(b"GGUF"))
    assert RUNNER.invoke(app, ["models", "fetch"]).stdout == f"{path}\n"
    assert path.read_bytes() == b"GGUF"


def test_the_list_says_what_is_here_and_where(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(fetch, "deliver", deliver)
    assert str(home) in RUNNER.invoke(app, ["models"]).stdout
    first, second = list(ALIASES)
    assert f"paceline models fetch {first}" in RUNNER.invoke(app, ["models"]).stdout
    RUNNER.invoke(app, ["models", "fetch", first])
    listed = RUNNER.invoke(app, ["models"]).stdout
    assert str(catalog.cached_path(first)) in listed
    assert f"paceline models fetch {second}" in listed


def test_the_list_says_what_a_cut_fetch_left(home: Path) -> None:
    folder = home / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    with (folder / "part").open("wb") as out:
        out.truncate(30_000_000)
    assert "30.0 MB of it are here; fetch goes on from there" in RUNNER.invoke(app, ["models"]).stdout
    removed = RUNNER.invoke(app, ["models", "remove", DEFAULT_MODEL]).stdout
    assert removed.startswith(f"{DEFAULT_MODEL} was removed (30.0 MB)")
    assert not folder.exists()


def test_a_model_is_fetched_and_removed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "deliver", deliver)
    fetched = RUNNER.invoke(app, ["models", "fetch", DEFAULT_MODEL.upper()])
    assert fetched.exit_code == 0, fetched.output
    path = catalog.cached_path(DEFAULT_MODEL)
    assert path is not None
    assert fetched.stdout == f"{path}\n"
    removed = RUNNER.invoke(app, ["models", "remove", DEFAULT_MODEL]).stdout
    back = f"paceline models fetch {DEFAULT_MODEL} brings it back"
    assert removed == f"{DEFAULT_MODEL} was removed (98.4 MB); {back}\n"
    assert catalog.cached_path(DEFAULT_MODEL) is None
    assert RUNNER.invoke(app, ["models", "remove", DEFAULT_MODEL]).stdout == f"{DEFAULT_MODEL} was not in the cache\n"


def test_without_a_name_the_default_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "deliver", deliver)
    assert RUNNER.invoke(app, ["models", "fetch"]).stdout == f"{catalog.cached_path(DEFAULT_MODEL)}\n"


@pytest.mark.parametrize("command", ["fetch", "remove"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-model", f"type one of {', '.join(ALIASES)}"),
        ("smolm2", f"did you mean {DEFAULT_MODEL}?"),
        ("Qwen/Qwen3-0.6B", "type paceline generate --model Qwen/Qwen3-0.6B"),
        ("folder/model.gguf", "a path or hub id needs no fetching"),
    ],
)
def test_an_unknown_model_is_refused_in_one_sentence(command: str, name: str, said: str) -> None:
    result = RUNNER.invoke(app, ["models", command, name])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{name!r} is not a model known by name; ")
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [["models", "fetch"], ["generate", "x"], ["chat"]])
def test_without_a_network_the_way_around_is_told(
    words: list[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    def refuse(alias: Alias, *ignored: Any) -> None:
        raise FetchError(f"{alias.name} could not be fetched: no network; give the path of a .gguf file instead")

    monkeypatch.setattr(fetch, "deliver", refuse)
    result = RUNNER.invoke(app, words, input="")
    assert result.exit_code == 2
    known = ALIASES[DEFAULT_MODEL]
    assert "give the path of a .gguf file instead, or copy" in result.stderr
    assert result.stderr.strip().endswith(str(home / "models" / known.name / known.filename))
