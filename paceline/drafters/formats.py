"""Which published kind of drafter a folder or a repository of the hub holds: by config and tensors, never by name.

The marks of each kind stand in the table of drafters. A kind that is only known is told apart all the same, so that
none is taken for a draft model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.drafters import table
from paceline.drafters.table import Kind, Marks
from paceline.errors import CheckpointError, OptionError, PacelineError
from paceline.models import hub
from paceline.models.json_file import is_folder


def find_held(name: str) -> Kind | None:
    """By config and names of tensors and files; None for a model of its own, and for what is no folder or hub id.

    The hub is asked for what tells, which is little, before a repository is fetched.
    """
    folder = Path(os.path.expanduser(name))  # which leaves the ~ of nobody as it is
    if is_folder(folder):
        return find_kind(_config(folder), _tensor_names(folder))
    if folder.exists() or "/" not in name or folder.suffix == ".gguf" or not hub.ID.fullmatch(name):
        return None
    held = hub.look(name, frozenset(file for kind in table.KINDS for file in kind.files))
    names = _tensor_names(held.folder) if held.tensors is None else held.tensors
    return find_kind(_config(held.folder), names, held.files)


def check_loads(name: str) -> None:
    """Refuse what holds no draft model but a drafter of another kind, in a sentence that names the kind."""
    _refuse(name, find_held(name))


def check_tensors(path: str, names: Collection[str]) -> None:
    """The same by the names of its tensors, once they are known."""
    _refuse(path, find_kind({}, names))


@contextmanager
def explaining(model: Any) -> Iterator[None]:
    """Around reading a target: where that fails because it is a drafter, the error says so, and how it is used."""
    try:
        yield
    except CheckpointError as error:
        kind = _held_here(str(model)) if isinstance(model, str | Path) else None
        if kind is None or not kind.loads:
            raise
        used = f"give the model it drafts for, and it as the drafter: {kind.written('model=…')}"
        raise CheckpointError(f"{model} holds {kind.called}, which is no model by itself; {used}") from error


def _held_here(name: str) -> Kind | None:
    """As far as that is known without the hub."""
    folder = Path(os.path.expanduser(name))
    here = folder if is_folder(folder) else None if folder.exists() else hub.find_here(name)
    return None if here is None else find_kind(_config(here), _tensor_names(here))


def find_kind(config: Mapping[str, Any], tensors: Collection[str], files: Collection[str] = ()) -> Kind | None:
    """The first kind whose mark is there; None for a model of its own."""
    algorithm = config.get("speculators_model_type")
    for kind in table.KINDS:
        if algorithm is not None and algorithm in kind.marks.algorithms:
            return kind
    return next(
        (kind for kind in table.KINDS if _has(kind.marks, config, tensors) or set(kind.files) & set(files)), None
    )


def _has(marks: Marks, config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    architectures = str(config.get("architectures"))  # a list of names; whoever loads it says what is wrong
    return (
        config.get("model_type") in marks.types
        or bool(marks.architecture and marks.architecture in architectures)
        or any(key in config for key in marks.keys)
        or bool(marks.tensors and any(re.match(marks.tensors, name) for name in tensors) and marks.whole not in tensors)
    )


def not_yet(path: str, kind: Kind) -> OptionError:
    return OptionError(f"{path} holds {kind.called}, which {table.not_yet()}")


def _refuse(path: str, kind: Kind | None) -> None:
    if kind is not None and kind.loads:
        raise OptionError(f"{path} holds {kind.called}, not a draft model; write {kind.written('model=…')}")
    if kind is not None:
        raise not_yet(path, kind)


def _tensor_names(folder: Path) -> Collection[str]:
    from paceline.models.sources import FolderSource  # which imports torch

    others = tuple(name for kind in table.KINDS for name in kind.files)
    try:
        return FolderSource(folder, others).names()
    except PacelineError:
        return ()  # whoever loads it says what is wrong


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # whoever loads it says what is wrong
    return found if isinstance(found, dict) else {}
