"""Which drafter several spellings together mean, and what they add to one that our own words name.

This module knows drafters by their configs' fields: an option that is no field of the chosen one does not apply to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import drafters
from paceline.compat import table
from paceline.compat.reading import Reading
from paceline.drafters.table import MODEL, NONE, find_config
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.drafters.base import DrafterConfig

Chosen = tuple[str, dict[str, Any]]  # a drafter's word or none, and its options

NEEDS_DRAFTER = " needs a drafter to apply to: speculative_model (a model, or '[ngram]') or drafter"
BY_NGRAM = ("[ngram]", "ngram")  # what stands for a model where none is meant


def choose(reading: Reading, named: Collection[str] = ()) -> Chosen | None:
    """The drafter that foreign words ask for; None where they name none. named: the kinds that our own words name."""
    _refuse_two_styles(reading)
    if reading.get("draft.model") is None and reading.get("draft.method") in {MODEL.word} & set(named):
        reading.pop("draft.method")  # it says what is known
    parts = reading.parts()
    method, model = parts.pop("method", None), parts.get("model")
    if method is None and model in BY_NGRAM:
        method = "ngram"
    elif method is None and model is not None:
        method = drafters.read_word(model)[0].word if isinstance(model, str) else MODEL.word
    if method is None:
        if "speculative_config" in reading.names:
            raise OptionError("speculative_config needs 'model', the draft model, or a 'method' that has none")
        return None
    if method in ("ngram", "reference"):
        parts = _ngram(reading, parts, method)
        method = "ngram"
    elif model is None and "model" in options_of(method):
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
    known = {name for kind in kinds for name in options_of(kind)}
    for part in parts:
        if part not in known:
            others = " or ".join(_called(kind) for kind in dict.fromkeys(kinds))
            reading.notes.append(f"{reading.written(f'draft.{part}')} does not apply to {others} and is left out")
    return {part: value for part, value in parts.items() if part in known}


def complete(reading: Reading, kind: str, options: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a drafter that our own words name, with those of its kind that foreign words add."""
    added = {part: value for part, value in parts.items() if part in options_of(kind)}
    for part, value in added.items():
        if part in options and str(options[part]) != str(value):
            written = reading.written(f"draft.{part}")
            raise OptionError(f"{written} and the drafter's {part}={options[part]} contradict each other; give one")
    if "max_match" in added and "ngram_prompt_lookup_max" in reading.names:
        added.setdefault("min_match", 1)  # as vLLM has it
    return {**added, **options}


def options_of(kind: str) -> tuple[str, ...]:
    """The options of a kind; plain decoding has none."""
    row = drafters.table.find(kind)
    return () if row is None else row.options


def kind_of(word: str) -> str:
    """What a word of ours names; what is none of the words is a model."""
    return word if word == NONE else drafters.read_word(word)[0].word


def kinds_of(given: Any) -> list[str]:
    """The kinds of drafters in whatever `drafter=` may be; none for an object that is not ours."""
    if given is None:
        return []
    if isinstance(given, str | Path):
        return [kind_of(str(given))]
    if hasattr(given, "state_dict"):
        return [MODEL.word]
    found = (find_config(config) for config in getattr(given, "configs", [given]))
    return [kind.word for kind in found if kind is not None]


def build(chosen: Chosen) -> DrafterConfig | None:
    """The config itself."""
    word, options = chosen
    row = drafters.table.find(word)
    return None if row is None else row.make(options)


def _called(kind: str) -> str:
    row = drafters.table.find(kind)
    return "plain decoding" if row is None else row.called
