"""Where packed weights are kept: beside a model of the cache, else in a folder of the cache, with room for a few.

Knows sources, the cache folder and its room. What is in such a file is the business of `kernels.cpu.tiles`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError
from paceline.kernels import Ops
from paceline.models import catalog
from paceline.models.weights import Source

if TYPE_CHECKING:
    from paceline.kernels.cpu.tiles import Tiles

SUFFIX = ".tiles"
LEAST_BYTES = 16 * 10**6  # below it packing takes no time
MOST_BYTES = 8 * 10**9  # of models that are not the cache's own; the ones used last stay
MOST_OF_DISK = 4  # no file of more than a fourth of what is free
MOST_BESIDE = 2  # of one model of the cache, packed in different ways
LEFT_OVER = 3600.0  # seconds after which a file that was never finished will not be


def find_tiles(ops: Ops, source: Source, dtype: torch.dtype) -> Tiles | None:
    """The kept tiles of a source, or a place for them; None where there is nothing to keep."""
    if ops.name != "native" or not source.files:
        return None
    from paceline.kernels.cpu.tiles import Tiles

    how = [str(item) for item in (dtype, getattr(ops, "stored", None), getattr(ops, "quantization", None))]
    try:
        files = [file.resolve() for file in source.files]
        states = [file.stat() for file in files]
        identity = [[str(f), s.st_size, s.st_mtime_ns, s.st_ino] for f, s in zip(files, states)]
        return Tiles(_place(files[0], how), [identity, how])
    except (OSError, RuntimeError, PacelineError):  # a model that has gone, a home that nobody has
        return None


def keep_tiles(tiles: Tiles) -> None:
    """Write what was packed, if it is enough to matter and there is room for it."""
    folder = tiles.path.parent
    with contextlib.suppress(OSError):
        if tiles.num_packed < LEAST_BYTES:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if tiles.num_packed * MOST_OF_DISK <= shutil.disk_usage(folder).free and tiles.save():
            _prune(folder, tiles.path)


def _place(file: Path, how: list[str]) -> Path:
    """A model that the cache holds takes its tiles along when it is removed."""
    home = catalog.cache_dir().resolve()
    mark = hashlib.sha256(json.dumps([str(file), how]).encode()).hexdigest()[:12]
    if home / "models" in file.parents:
        return file.with_name(f"{file.name}.{mark}{SUFFIX}")
    return home / "tiles" / f"{file.parent.name[:60]}-{file.stem[:60]}-{mark}{SUFFIX}"


def _prune(folder: Path, newest: Path) -> None:
    """Drop what nobody finished, and the tiles that were unused for longest: beside a model all but two."""
    for part in folder.glob(f".*{SUFFIX}.part"):
        if time.time() - part.stat().st_mtime > LEFT_OVER:
            part.unlink(missing_ok=True)
    kept = sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: (file != newest, -file.stat().st_atime))
    room, most = MOST_BYTES, len(kept) if folder.name == "tiles" else MOST_BESIDE
    for number, file in enumerate(kept):
        room -= os.stat(file).st_size
        if file != newest and (room < 0 or number >= most):
            file.unlink(missing_ok=True)
            file.with_name(f"{file.name}.checked").unlink(missing_ok=True)
