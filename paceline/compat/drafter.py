"""Which drafter several spellings together mean.

This module knows drafters by their configs' fields: an option that is no field of the chosen one does not apply to it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paceline.compat import table
from paceline.compat.reading import Reading
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.drafters.base import DrafterConfig

Chosen = tuple[str, dict[str, Any]]  # none, ngram, suffix or draft, and its options

NEEDS_DRAFTER = " needs a drafter to apply to: speculative_model (a model, or '[ngram]') or drafter"
BY_NGRAM = ("[ngram]", "ngram")  # what stands for a model where none is meant
CALLED = {"ngram": "n-gram drafting", "suffix": "suffix drafting", "draft": "a draft model", "none": "plain decoding"}


def choose(reading: Reading) -> Chosen | None:
    """The drafter that foreign words ask for; None where they name none."""
    _refuse_two_styles(reading)
    parts = reading.parts()
    method, model = parts.pop("method", None), parts.get("model")
    if method is None and model in BY_NGRAM:
        method = "ngram"
    elif method is None and model is not None:
        method = "draft"
    if method is None:
        _refuse_no_drafter(reading, parts)
        return None
    if method in ("ngram", "reference"):
        parts = _ngram(reading, parts, method)
        method = "ngram"
    elif method == "draft" and model is None:
        raise OptionError(f"{reading.written('draft.method')} needs the draft model, too")
    return method, _applicable(reading, method, parts)


def _refuse_two_styles(reading: Reading) -> None:
    flat = [row.name for row in table.SPELLINGS if row.name in reading.names and row.to.startswith("draft.")]
    if "speculative_config" in reading.names and flat:
        names = ", ".join(dict.fromkeys(flat))
        raise OptionError(f"speculative_config and {names} were both given; give one of the two")


def _refuse_no_drafter(reading: Reading, parts: dict[str, Any]) -> None:
    """Options of a drafter without one. A draft length alone may be for a drafter that is named elsewhere or later."""
    if "speculative_config" in reading.names:
        raise OptionError("speculative_config needs 'model', the draft model, or a 'method' that has none")
    for part in parts:
        if part != "num_draft_tokens":
            raise OptionError(reading.written(f"draft.{part}") + NEEDS_DRAFTER)


def _ngram(reading: Reading, parts: dict[str, Any], method: str) -> dict[str, Any]:
    """The options of an n-gram drafter, by the rules of the system that was spelled."""
    old = parts.get("model") == BY_NGRAM[0] and "speculative_config" not in reading.names
    if parts.get("model") in BY_NGRAM:
        del parts["model"]
    if old and "max_match" not in parts:
        raise OptionError("speculative_model='[ngram]' needs ngram_prompt_lookup_max, a whole number of 1 or more")
    if old:
        parts.setdefault("min_match", 1)
    return {**parts, "rule": "reference"} if method == "reference" else parts


def _applicable(reading: Reading, kind: str, parts: dict[str, Any]) -> dict[str, Any]:
    """The options that this kind of drafter has; a notice for each other."""
    known = {field.name for field in dataclasses.fields(_kinds()[kind])} if kind != "none" else set()
    for part in parts:
        if part not in known:
            written = reading.written(f"draft.{part}")
            reading.notes.append(f"{written} does not apply to {CALLED[kind]} and is left out")
    return {part: value for part, value in parts.items() if part in known}


def _kinds() -> dict[str, Any]:
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.ngram import NGram
    from paceline.drafters.suffix import Suffix

    return {"ngram": NGram, "suffix": Suffix, "draft": DraftModel}


def build(chosen: Chosen) -> DrafterConfig | None:
    """The config itself."""
    kind, options = chosen
    if kind == "none":
        return None
    config: DrafterConfig = _kinds()[kind](**options)
    return config


def write(chosen: Chosen) -> str:
    """The same as it is written after --drafter."""
    kind, options = chosen
    model = str(options.get("model", ""))
    if any(sign in model for sign in ",:="):  # a path that the list of options could not hold
        kind, options = model, {name: value for name, value in options.items() if name != "model"}
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    return f"{kind}:{listed}" if listed else kind


def make(given: Any, num_draft_tokens: int | None = None) -> DrafterConfig | None:
    """A drafter's config from whatever a user may give: a word, a name, a config, or a loaded transformers model.

    num_draft_tokens: the draft length of one that does not bring its own.
    """
    from paceline import drafters
    from paceline.drafters.draft_model import DraftModel

    config = DraftModel(given) if hasattr(given, "state_dict") else drafters.make(given)
    if num_draft_tokens is None or config is None or config is given:
        return config
    changed: DrafterConfig = dataclasses.replace(config, num_draft_tokens=num_draft_tokens)  # type: ignore[type-var]
    return changed
