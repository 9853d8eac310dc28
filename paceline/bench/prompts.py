"""What is asked in a measurement: prompts of our own, or a file of the user's.

Knows texts and the field names common datasets use. Must not know models, templates or tokens.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.bench.demos import DEMOS, Question
from paceline.errors import OptionError

DEFAULT_DEMO = "te"
FIELDS = ("turns", "prompt", "question", "text")  # tried in this order; of turns, the first


def read_questions(path: Path | None, limit: int | None = None, demo: str | None = None) -> list[Question]:
    """The first `limit` questions of a .jsonl or .jsonl.gz file, or of our own."""
    if limit is not None and limit < 1:
        raise OptionError(f"num_prompts={limit} is not allowed; allowed: 1 or more")
    if path is not None and demo is not None:
        raise OptionError("a demo and a dataset were both given; give one")
    if path is None:
        return built_in(demo or DEFAULT_DEMO)[:limit]
    questions: list[Question] = []
    try:
        for number, line in _lines(path):
            if limit is not None and len(questions) >= limit:
                break
            questions.append(_read_line(line, f"{path}, line {number}"))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:  # a broken .gz is one of the first three
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"the dataset {path} cannot be read: {reason}") from None
    if not questions:
        raise OptionError(f"the dataset {path} holds no prompts")
    return questions


def built_in(name: str) -> list[Question]:
    if name not in DEMOS:
        raise OptionError(
            f"the demo {name!r} is not known; allowed: te (English), tc (Chinese) or chat (conversations)"
        )
    return list(DEMOS[name])


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    open_text: Any = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _read_line(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where}, is not JSON: {error}") from None
    except RecursionError:
        raise OptionError(f"{where}, is not usable JSON: it nests too deep") from None
    text = _find_text(row) if isinstance(row, dict) else None
    if text is None:
        raise OptionError(f"{where}, has no text to ask; one of the fields {', '.join(FIELDS)} must hold it")
    return Question(where.rpartition(", ")[2], text)


def _find_text(row: dict[str, Any]) -> str | None:
    for name in FIELDS:
        value = row.get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, str) and value.strip():
            return value
    return None
