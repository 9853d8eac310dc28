"""Which drafter several spellings together mean, and what they add to one that our own words name.

This module knows drafters by their configs' fields: an option that is no field of the chosen one does not apply to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline import drafters
from paceline.compat import table
from paceline.compat.reading import Reading
from paceline.drafters.table import MODEL, NONE, find, find_config
from paceline.errors import OptionError, not_an_object

NEEDS_DRAFTER = " needs a drafter to apply to: speculative_model (a model, or '[ngram]') or drafter"
BY_NGRAM = ("[ngram]", "ngram")  # what stands for a model where none is meant


def choose(reading: Reading, named: Collection[str] = ()) -> tuple[str, dict[str, Any]] | None:
    """The drafter that foreign words ask for: its word or none, and its options. None where they name none.

    named: the kinds that our own words name.
    """
    inner = "speculative_config" in reading.names
    flat = [row.name for row in table.SPELLINGS if row.name in reading.names and row.to.startswith("draft.")]
    if inner and flat:
        raise OptionError(
            f"speculative_config and {', '.join(dict.fromkeys(flat))} were both given; give one of the two"
        )
    if reading.get("draft.model") is None and reading.get("draft.method") in {MODEL.word} & set(named):
        reading.pop("draft.method")  # it says what is known
    parts = reading.parts()
    method, model = parts.pop("method", None), parts.get("model")
    if method is None and (model in BY_NGRAM or "rule" in parts):
        method = "ngram"
    elif method is None and model is not None:
        method = kind_of(model) if isinstance(model, str) else MODEL.word
    if method is None:
        if inner:
            raise OptionError("speculative_config needs 'model', the draft model, or a 'method' that has none")
        return None
    kind = find(method)
    if kind is not None and kind.parallel and parts.pop("parallel", False):
        method = kind.parallel
    if method == "ngram" and model in BY_NGRAM:
        del parts["model"]
        if model == BY_NGRAM[0] and not inner:  # as vLLM had it
            if "max_match" not in parts:
                raise OptionError(f"speculative_model={model!r} needs ngram_prompt_lookup_max, a number of 1 or more")
            parts.setdefault("min_match", 1)
    elif model is None and kind is not None and kind.needs_model:
        raise OptionError(f"{reading.written('draft.method')} needs a model, too: a folder or a hub id")
    return method, applicable(reading, [method], parts)


def applicable(reading: Reading, kinds: Collection[str], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a drafter of these kinds has; a notice for each other."""
    fits = {part: value for part, value in parts.items() if any(part in options_of(kind) for kind in kinds)}
    rows = [find(kind) for kind in dict.fromkeys(kinds)]
    others = " or ".join("plain decoding" if row is None else row.called for row in rows)
    left = [reading.written(f"draft.{part}") for part in parts if part not in fits]
    reading.notes += [f"{written} does not apply to {others} and is left out" for written in left]
    return fits


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


def options_of(word: str) -> tuple[str, ...]:
    """The options of a kind; plain decoding has none."""
    kind = find(word)
    return () if kind is None else kind.options


def kind_of(word: str) -> str:
    """What a word of ours names; what is none of the words is a model."""
    return word if word == NONE else drafters.read_word(word)[0].word


def kinds_of(given: Any) -> list[str]:
    """The kinds of drafters in whatever `drafter=` may be; none for an object that is not ours."""
    if isinstance(given, type):
        raise OptionError(f"drafter must be an object, {not_an_object(given)}")
    config = drafters.make(given)
    if config is None:
        return [] if given is None else [NONE]
    return [kind.word for kind in map(find_config, getattr(config, "configs", [config])) if kind is not None]
