"""A drafter as one text, as it stands after `--drafter`: WORD, or WORD:name=value,name=value.

Knows how the text is cut and joined. Must not know which drafters and options there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import OptionError

OPTION = re.compile(r"\s*\w+\s*=")


def split(text: str) -> tuple[str, dict[str, str]]:
    """The word, and its options. A colon that no name=value follows belongs to the word: it may be a path."""
    word, colon, rest = text.rpartition(":")
    if not colon or not OPTION.match(rest):
        return text.strip(), {}
    options: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name:
            raise OptionError(f"--drafter {text!r}: {part!r} is not key=value")
        if name in options:
            raise OptionError(f"--drafter {text!r} gives {name} twice; give it once")
        options[name] = value.strip()
    return word.strip(), options


def join(word: str, options: Mapping[str, Any]) -> str:
    """The text that `split` reads as these; a model whose path the list could not hold stands before it."""
    model = str(options.get("model", ""))
    if any(sign in model for sign in ",:="):
        word, options = model, {name: value for name, value in options.items() if name != "model"}
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    return f"{word}:{listed}" if listed else word
