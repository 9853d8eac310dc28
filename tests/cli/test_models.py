"""`paceline models`."""

from __future__ import annotations

import contextlib
import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import DraftModel
from paceline.cli import app, loading
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
    first, second, *_ = list(ALIASES)
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


GEMMA = "gemma3-270m"
FETCH = ["models", "fetch", GEMMA]


def test_without_a_terminal_a_licence_is_accepted_by_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "deliver", deliver)
    listed = RUNNER.invoke(app, ["models"]).stdout
    assert f"licence to accept once: {ALIASES[GEMMA].terms}" in listed
    for words in (FETCH, ["generate", "x", "--model", GEMMA]):
        refused = RUNNER.invoke(app, words, input="y\n")
        assert refused.exit_code == 2
        assert f"type paceline models fetch {GEMMA} --accept-licence" in refused.stderr
    fetched = RUNNER.invoke(app, [*FETCH, "--accept-licence"])
    assert fetched.exit_code == 0 and ALIASES[GEMMA].terms in fetched.stderr
    assert fetched.stdout == f"{catalog.cached_path(GEMMA)}\n"
    assert f"licence accepted: {ALIASES[GEMMA].terms}" in RUNNER.invoke(app, ["models"]).stdout
    RUNNER.invoke(app, ["models", "remove", GEMMA])
    assert RUNNER.invoke(app, FETCH).exit_code == 0, "an earlier answer counts"


def test_the_flag_is_for_draft_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(loading, "fetch", lambda name, accept: asked.append((name, accept)))
    monkeypatch.setattr("paceline.llm.LLM", lambda *given, **options: None)
    loading.load({"model": DEFAULT_MODEL, "accept_licence": True}, DraftModel(GEMMA))
    assert asked == [(DEFAULT_MODEL, True), (GEMMA, True)]


class Seated(io.StringIO):
    """A stream with somebody in front of it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "agreed"), [("y", True), ("YES", True), ("n", False), ("", False)])
def test_at_a_terminal_whoever_fetches_is_asked_for_consent(
    monkeypatch: pytest.MonkeyPatch, answer: str, agreed: bool
) -> None:
    monkeypatch.setattr(fetch, "deliver", deliver)
    shown = Seated()
    monkeypatch.setattr("sys.stdin", Seated(f"{answer}\n"))
    monkeypatch.setattr("sys.stderr", shown)
    with contextlib.nullcontext() if agreed else pytest.raises(FetchError, match="its licence was not accepted"):
        loading.fetch(GEMMA)
    assert shown.getvalue().startswith(f"{GEMMA} comes under the Gemma licence ({ALIASES[GEMMA].terms}). Do you accept")
    assert catalog.is_accepted(GEMMA) == agreed
    assert (catalog.cached_path(GEMMA) is not None) == agreed


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
