"""Drafters, and what turns whatever a user wrote into a drafter's config by the one table of them (`table`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.drafters import formats, table
from paceline.drafters.table import LENGTH, NONE, Kind
from paceline.errors import OptionError, nearest, not_an_object
from paceline.models.json_file import is_folder

if TYPE_CHECKING:
    from paceline.drafters.base import DrafterConfig


def read_word(word: str) -> tuple[Kind, dict[str, Any]]:
    """The kind that a word, path or hub id names, and the options it gives by itself: a model's are its name."""
    there = is_folder(Path(word)) or Path(word).exists()
    kind = None if there else table.find(word)
    if kind is not None:
        return kind, {}
    if not there:
        _refuse_colon(word)
        _refuse_several(word)
    known = [NONE, *(one.word for one in table.kinds())]
    near = None if there or "/" in word else nearest(word, known)  # no word has a slash; hub ids and paths have
    if near:
        raise OptionError(f"drafter {word!r} is not known and no such path exists; did you mean {near!r}?")
    held = formats.find_held(word)
    if held is not None and not held.loads:
        raise formats.not_yet(word, held)
    return held or table.MODEL, {"model": word}


def _refuse_colon(word: str) -> None:
    """`eagle:PATH`, or the command line's `eagle:model=PATH` given in Python, is no model's name."""
    kind = table.find(word.partition(":")[0]) if ":" in word else None
    if kind is not None:
        option = "model=…" if kind.has_model else "option=…"
        raise OptionError(f"drafter {word!r} is not known; allowed: {kind.written(option)}")


def _refuse_several(word: str) -> None:
    parts = [part.strip() for part in word.split(",")]
    if len(parts) > 1 and all(table.find(part) is not None for part in parts):
        raise OptionError(f"drafter {word!r} names several; in turn they are FirstOf(…), or --drafter once for each")


def make(given: Any, num_draft_tokens: int | None = None) -> DrafterConfig | None:
    """A drafter's config from whatever a user may give: a word, a model's name, path or object, a config; or None.

    num_draft_tokens: the draft length of one that does not bring its own.
    """
    config: Any
    if given is None or given == NONE:
        return None
    if isinstance(given, str | Path):
        kind, options = read_word(str(given))
        config = kind.make(options)
    elif isinstance(given, type):
        raise OptionError(f"drafter must be an object, {not_an_object(given)}")
    elif hasattr(given, "state_dict"):  # a loaded model
        config = table.MODEL.make({"model": given})
    elif hasattr(given, "create"):
        config = given
    else:
        raise OptionError(
            f"drafter={given!r} is not a drafter; allowed: {table.words()}, or an object such as NGram(…), Suffix(…), "
            "DraftModel(…), FirstOf(…), or a drafter of your own"
        )
    if num_draft_tokens is None or config is given or LENGTH not in table.options_of(config):
        made: DrafterConfig = config
        return made
    changed: DrafterConfig = dataclasses.replace(config, **{LENGTH: num_draft_tokens})
    return changed
