"""What is asked in a measurement: ten prompts of our own, or a file of the user's.

Knows texts and the field names common datasets use. Must not know models, templates or tokens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import OptionError

FIELDS = ("turns", "prompt", "question", "text")  # tried in this order; of turns, the first


@dataclass(frozen=True)
class Question:
    """A short name for tables, and the text to be answered."""

    name: str
    text: str


_LIGHTHOUSE = (
    "The lighthouse at Gull Point was built in 1871 from stone that was carried across the bay in fishing boats. For "
    "ninety years a keeper climbed its 112 steps every evening to light the lamp. In 1961 the lamp became electric and "
    "the last keeper, Martha Finch, moved to the village. Today the lighthouse is a small museum, and visitors climb "
    "the 112 steps to see the view from the lamp room."
)
_GARDEN = (
    "The community garden opens every Saturday at nine in the morning. Members water the vegetable beds first, because "
    "the sun is still low. At ten o'clock the compost is turned. At eleven everybody shares tea and bread under the "
    "apple tree, and the harvest is divided between the members who are there."
)
_LETTER = (
    "dear mr lopez, thank you for you're letter of the 3rd of may. we have recieve the two chairs and the table. one "
    "of the chairs have a broken leg, and the table has a scratch on it's left side. please send us a new chair before "
    "the end of the month. we will keep the table if you give us a small discount."
)
_INVENTORY = (
    "The expedition took six tents, two stoves, forty metres of rope, a first aid kit, three maps, a compass and food "
    "for eleven days. On the second day they lost one stove in the river, and on the fifth day they left two tents at "
    "the lower camp."
)
_CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""

BUILT_IN = (
    Question("summary: lighthouse", f"Summarize this paragraph in two sentences.\n\n{_LIGHTHOUSE}"),
    Question(
        "copy-edit: letter", f"Correct the spelling and grammar of this letter and write it out again.\n\n{_LETTER}"
    ),
    Question("list: inventory", f"Make a bullet list of everything the expedition took.\n\n{_INVENTORY}"),
    Question("answer: lighthouse", f"{_LIGHTHOUSE}\n\nWho was the last keeper, and what happened in 1961?"),
    Question("code: stack", f"Write this Python class again and add a method peek and a method is_empty.\n\n{_CODE}"),
    Question("rewrite: garden", f"Rewrite this text in the past tense.\n\n{_GARDEN}"),
    Question("timetable: garden", f"Write a timetable of the morning from this text.\n\n{_GARDEN}"),
    Question("open: bicycle", "Explain to a ten-year-old why a bicycle stays upright while it is moving."),
    Question("open: story", "Write a short story about a clockmaker who finds a letter inside an old clock."),
    Question("open: advice", "What should I think about before I adopt a dog?"),
)


def read_questions(path: Path | None, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a .jsonl or .jsonl.gz file, or of the built-in ones."""
    if limit is not None and limit < 1:
        raise OptionError(f"num_prompts={limit} is not allowed; allowed: 1 or more")
    if path is None:
        return list(BUILT_IN[:limit])
    questions: list[Question] = []
    try:
        for number, line in _lines(path):
            if limit is not None and len(questions) >= limit:
                break
            questions.append(_read_line(line, f"{path}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:  # a broken .gz is an OSError or an EOFError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"the dataset {path} cannot be read: {reason}") from None
    if not questions:
        raise OptionError(f"the dataset {path} holds no prompts")
    return questions


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
