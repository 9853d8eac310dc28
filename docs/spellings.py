"""What to type here for a row of the table of spellings (`paceline.compat.table`), as its page shows it."""

from __future__ import annotations

from typing import Any

from paceline.compat.flags import FLAGS
from paceline.compat.table import BOTH, COMMAND_LINE, LIBRARY
from paceline.drafters.table import find, loadable

CALLED = {**FLAGS, "default_max_tokens": "--max-tokens"}


def ours(row: Any) -> str:
    """In the library and on the command line, as far as it holds there; nothing where there is nothing to type."""
    if not row.to:
        return ""
    name, _, value = row.to.partition("=")
    part = name.removeprefix("draft.")
    if part == "prompt":
        library = flag = "PROMPT"
    elif part == name:
        library, flag = row.to, f"{CALLED.get(name, '--' + name.replace('_', '-'))} {value}".strip()
    elif part in ("model", "method"):
        kind = find(value or "draft")
        word = "MODEL" if kind is not None and kind.has_model else value
        library, flag = f"drafter={word if word == 'MODEL' else repr(word)}", f"--drafter {word}"
    else:
        having = [kind.word for kind in loadable() if part in kind.options]
        if not having:
            return ""
        word, told = having[0] if len(having) == 1 else "WORD", f"{part}={value or '…'}"
        library, flag = f"the drafter's {told}", f"--drafter {word}:{told}"
    return {LIBRARY: library, COMMAND_LINE: flag, BOTH: f"{library}, {flag}"}[row.where]
