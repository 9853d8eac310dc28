"""Drafters, and the one table that turns what a user wrote into one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.drafters.base import DrafterConfig


def make(drafter: Any) -> DrafterConfig | None:
    """A drafter's config from a config object, a word, or the path or name of a model; None stays None."""
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.ngram import NGram
    from paceline.drafters.suffix import Suffix

    words: dict[str, type] = {"ngram": NGram, "suffix": Suffix}
    if drafter is None or drafter == "none":
        return None
    if isinstance(drafter, str) and drafter in words:
        config: DrafterConfig = words[drafter]()
        return config
    if isinstance(drafter, str | Path):
        near = difflib.get_close_matches(str(drafter), [*words, "none"], n=1, cutoff=0.75)
        if near and not Path(drafter).exists():
            raise OptionError(
                f"drafter {str(drafter)!r} is not known and no such path exists; did you mean {near[0]!r}?"
            )
        return DraftModel(str(drafter))
    if hasattr(drafter, "create"):
        made: DrafterConfig = drafter
        return made
    raise OptionError(
        f"drafter={drafter!r} is not a drafter; allowed: None, {', '.join(words)}, a model's name or path, or an "
        "object such as NGram(…), Suffix(…), DraftModel(…), FirstOf(…)"
    )
