"""The errors a user can meet. Each carries one sentence: what was given, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EMPTY = "the prompt is empty; it needs at least one character"


class PacelineError(Exception):
    """Anything paceline refuses to do, said in one sentence."""


class OptionError(PacelineError, ValueError):
    """An option, sampling parameter or prompt that cannot be used as given."""


class CheckpointError(PacelineError):
    """A weight, config or tokenizer file that is missing, corrupt or not what it claims to be."""


class FetchError(PacelineError):
    """A model that no source could deliver."""


class VocabularyError(PacelineError):
    """A drafter whose vocabulary does not fit the target's."""


class EngineError(PacelineError):
    """An engine that cannot go on."""


def first_line(error: BaseException) -> str:
    """An error of another library in one line; lines that only announce the next are joined with it."""
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    while first.endswith(":") and others:
        first = f"{first} {others.pop(0)}"
    return first


def not_an_object(given: object) -> str:
    """What was given where another kind of object was wanted; a class is told how it becomes one."""
    if isinstance(given, type):
        return f"not the class {given.__name__} itself; write {given.__name__}(…)"
    return f"not {type(given).__name__}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one is a slip of, or the beginning; None where none is that near."""
    asked, best, found = _letters(name), 0.0, None
    for other in known:
        letters = _letters(other)
        alike = difflib.SequenceMatcher(None, asked, letters).ratio()
        if len(asked) >= 4 and letters.startswith(asked[:2]):  # the beginning counts less than all of it
            alike = max(alike, difflib.SequenceMatcher(None, asked, letters[: len(asked) + 1]).ratio() - 0.1)
        if alike > best:
            best, found = alike, other
    return found if best >= NEAR else None


NEAR = 0.75  # --servr is --serve; sweep is no serve


def _letters(name: str) -> str:
    """What is compared: hyphens that begin a flag, underscores and case say nothing."""
    return name.lower().lstrip("-").replace("_", "-")
