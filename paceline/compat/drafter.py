"""Which drafter several spellings together mean, and what they add to one that our own words name.

This module knows drafters by their configs' fields: an option that is no field of the chosen one does not apply to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
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


def choose(reading: Reading, named: Collection[str] = ()) -> Chosen | None:
    """The drafter that foreign words ask for; None where they name none. named: the kinds that our own words name."""
    _refuse_two_styles(reading)
    if reading.get("draft.method") == "draft" and reading.get("draft.model") is None and "draft" in named:
        reading.pop("draft.method")  # it says what is known
    parts = reading.parts()
    method, model = parts.pop("method", None), parts.get("model")
    if method is None and model in BY_NGRAM:
        method = "ngram"
    elif method is None and model is not None:
        method = "draft"
    if method is None:
        if "speculative_config" in reading.names:
            raise OptionError("speculative_config needs 'model', the draft model, or a 'method' that has none")
        return None
    if method in ("ngram", "reference"):
        parts = _ngram(reading, parts, method)
        method = "ngram"
    elif method == "draft" and model is None:
        raise OptionError(f"{reading.written('draft.method')} needs the draft model, too")
    return method, applicable(reading, [method], parts)


def _refuse_two_styles(reading: Reading) -> None:
    flat = [row.name for row in table.SPELLINGS if row.name in reading.names and row.to.startswith("draft.")]
    if "speculative_config" in reading.names and flat:
        names = ", ".join(dict.fromkeys(flat))
        raise OptionError(f"speculative_config and {names} were both given; give one of the two")


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


def applicable(reading: Reading, kinds: Collection[str], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a drafter of these kinds has; a notice for each other."""
    known = {name for kind in kinds for name in fields_of(kind)}
    for part in parts:
        if part not in known:
            drafters = " or ".join(CALLED[kind] for kind in dict.fromkeys(kinds))
            reading.notes.append(f"{reading.written(f'draft.{part}')} does not apply to {drafters} and is left out")
    return {part: value for part, value in parts.items() if part in known}


def complete(reading: Reading, kind: str, options: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a drafter that our own words name, with those of its kind that foreign words add."""
    added = {part: value for part, value in parts.items() if part in fields_of(kind)}
    for part, value in added.items():
        if part in options and str(options[part]) != str(value):
            written = reading.written(f"draft.{part}")
            raise OptionError(f"{written} and the drafter's {part}={options[part]} contradict each other; give one")
    if "max_match" in added and "ngram_prompt_lookup_max" in reading.names:
        added.setdefault("min_match", 1)  # as vLLM has it
    return {**added, **options}


def fields_of(kind: str) -> set[str]:
    return set() if kind == "none" else {field.name for field in dataclasses.fields(_kinds()[kind])}


def kind_of(word: str) -> str:
    """What a word of ours names; what is none of the words is a model."""
    return word if word in ("none", "ngram", "suffix") else "draft"


def kinds_of(given: Any) -> list[str]:
    """The kinds of drafters in whatever `drafter=` may be; none for an object that is not ours."""
    if given is None:
        return []
    if isinstance(given, str | Path):
        return [kind_of(str(given))]
    if hasattr(given, "state_dict"):
        return ["draft"]
    configs = getattr(given, "configs", [given])
    return [kind for config in configs for kind, made in _kinds().items() if isinstance(config, made)]


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
