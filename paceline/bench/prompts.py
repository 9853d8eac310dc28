"""What is asked in a measurement: a file of the user's, or one of our own, which are the files in demos/.

Knows texts and the field names common datasets use. Must not know models, templates or tokens.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import OptionError

Messages = list[dict[str, str]]
FOLDER = Path(__file__).parent / "demos"
DEMOS = {
    "te": "English",
    "tc": "Chinese",
    "chat": "conversations",
    "edit": "texts and code to be written again with a change",
}
DEFAULT_DEMO = "te"
FIELDS = ("turns", "prompt", "question", "text")  # tried in this order, after messages; of turns, the first
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Question:
    """A short name for tables, and what is asked: one message, or a conversation whose last message is answered."""

    name: str
    messages: Messages
    category: str = ""  # as the file has it

    @property
    def text(self) -> str:
        return self.messages[-1]["content"]

    @property
    def is_conversation(self) -> bool:
        return len(self.messages) > 1


def read_questions(path: Path | None, limit: int | None = None, demo: str | None = None) -> list[Question]:
    """The first `limit` questions of a .jsonl or .jsonl.gz file, or of our own."""
    if limit is not None and limit < 1:
        raise OptionError(f"num_prompts={limit} is not allowed; allowed: 1 or more")
    if path is not None and demo is not None:
        raise OptionError("a demo and a dataset were both given; give one")
    if demo is not None and demo not in DEMOS:
        raise OptionError(f"the demo {demo!r} is not known; allowed: {listed_demos()}")
    source = path or FOLDER / f"{demo or DEFAULT_DEMO}.jsonl"
    questions: list[Question] = []
    try:
        for number, line in _lines(source):
            if limit is not None and len(questions) >= limit:
                break
            questions.append(_read_line(line, f"{source}, line {number}"))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:  # a broken .gz is one of the first three
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"the dataset {source} cannot be read: {reason}") from None
    if not questions:
        raise OptionError(f"the dataset {source} holds no prompts")
    return questions


def listed_demos() -> str:
    """For people."""
    *told, last = (f"{name} ({meaning})" for name, meaning in DEMOS.items())
    return f"{', '.join(told)} or {last}"


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
    messages = _find_messages(row) if isinstance(row, dict) else None
    if messages is None:
        raise OptionError(f"{where}, has no text to ask; one of the fields messages, {', '.join(FIELDS)} must hold it")
    name = row.get("name")
    category = row.get("category")
    called = name if isinstance(name, str) and name.strip() else where.rpartition(", ")[2]
    return Question(called, messages, category if isinstance(category, str) else "")


def _find_messages(row: dict[str, Any]) -> Messages | None:
    if _is_conversation(row.get("messages")):
        return [{"role": said["role"], "content": said["content"]} for said in row["messages"]]
    for name in FIELDS:
        value = row.get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, str) and value.strip():
            return [{"role": "user", "content": value}]
    return None


def _is_conversation(found: Any) -> bool:
    """Whether these are messages of which the last is a user's that asks something."""
    if not isinstance(found, list) or not found:
        return False
    whole = all(
        isinstance(said, dict) and said.get("role") in ROLES and isinstance(said.get("content"), str) for said in found
    )
    return whole and found[-1]["role"] == "user" and bool(found[-1]["content"].strip())
