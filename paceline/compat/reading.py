"""From spellings to our options, one at a time: `Reading` takes what a user gave and holds it in our words.

What two spellings say of one option has to agree. This module knows the table and how a value is read; it must not know
where options go afterwards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline.compat import table
from paceline.errors import OptionError, nearest

log = logging.getLogger("paceline")

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
SAID = {table.NO_EFFECT: "has no effect here", table.REFUSED: "is not supported", table.LATER: "is not there yet"}
STRATEGIES = {"sampling": True, "greedy_search": False}
MANY = ("stop", "stop_token_ids")  # options that add up instead of contradicting each other


class Notices:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._said:
                self._said.add(text)
                log.warning("%s", text)


class Reading:
    """What was given so far, in our words; `draft.NAME` is an option of the drafter."""

    def __init__(self, where: str, own: Collection[str]) -> None:
        self.where, self.own = where, own
        self.notes: list[str] = []  # for whoever gets through; a refusal stands alone
        self.names: set[str] = set()  # of the spellings taken
        self._found: dict[str, tuple[Any, str]] = {}  # our option → its value, and how it was written

    def take(self, name: str, value: Any, written: str) -> None:
        """One option under any of its names; of a foreign one, None and "" are as good as not given."""
        if name in self.own:
            self.put("draft.num_draft_tokens" if name == "num_draft_tokens" else name, value, written)
            return
        if not table.named(name, self.where):
            known = [*self.own, *table.names(self.where)]
            raise OptionError(unknown_option(name, known, f"known: {', '.join(sorted(self.own))}"))
        if value is None or (isinstance(value, str) and not value):
            return
        self.names.add(name)
        READERS.get(name, _by_table)(self, name, value, written)

    def put(self, ours: str, value: Any, written: str) -> None:
        """A value for an option of ours; another one that differs is refused, naming both."""
        before, first = self._found.get(ours, (None, ""))
        if ours in MANY:
            self._found[ours] = ([*(before or ()), *_listed(value)], written)
        elif before is None:
            self._found[ours] = (value, written)
        elif value is not None and before != value:
            raise OptionError(f"{first} and {written} contradict each other; give one")

    def get(self, ours: str) -> Any:
        return self._found.get(ours, (None, ""))[0]

    def written(self, ours: str) -> str:
        return self._found[ours][1]

    def pop(self, ours: str) -> tuple[Any, str]:
        """Its value, None where there is none, and how it was written."""
        return self._found.pop(ours, (None, ""))

    def found(self) -> dict[str, Any]:
        """All but the drafter's options."""
        return {ours: value for ours, (value, _) in self._found.items() if not ours.startswith("draft.")}

    def parts(self) -> dict[str, Any]:
        """The drafter's options."""
        found = [(ours.partition("draft.")[2], value) for ours, (value, _) in self._found.items()]
        return {part: value for part, value in found if part and value is not None}


def unknown_option(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """One sentence that names the nearest known option; where none is near, all of them or what `otherwise` says."""
    listed = list(dict.fromkeys(known))
    near = nearest(name, listed)
    hint = f"did you mean {near!r}?" if near else otherwise or f"known: {', '.join(sorted(listed))}"
    return f"option {name!r} is not known; {hint}"


def whole(value: Any, written: str) -> int:
    """A whole number, or text that is one."""
    try:
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"{written} is not allowed; allowed: a whole number") from None


def switch(value: Any, written: str) -> bool:
    """True or False, or text that says so."""
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise OptionError(f"{written} is not allowed; allowed: true or false")
    return text in TRUE


def show(name: str, value: Any) -> str:
    """An option as the library's user wrote it, in one short line."""
    plain = isinstance(value, str | int | float | Sequence | Mapping)
    text = " ".join((repr(value) if plain else type(value).__name__).split())
    return f"{name}={text if len(text) <= 60 else text[:59] + '…'}"


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    many = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str)
    return list(value) if many else [value]


def _by_table(reading: Reading, name: str, value: Any, written: str) -> None:
    """What the table says of a value; `READERS` have rules of their own."""
    rows = table.named(name, reading.where)
    values = {row.value for row in rows}
    if name in table.SWITCHES and rows[0].effect != table.NO_EFFECT:
        value = switch(value, written)
    elif "" in values and values & {"0", "1"}:  # the one number that is allowed; `True` and `1.0` are none
        value = whole(value, written)
    text = value if isinstance(value, str) else repr(value)
    if text not in values and "" not in values:
        allowed = ", ".join(row.value for row in rows if row.effect in (table.SAME, table.RENAMED))
        raise OptionError(f"{written} is not known; allowed: {allowed}")
    row = next(row for row in rows if row.value == (text if text in values else ""))
    told = f"{written} {SAID.get(row.effect, '')}" + (f"; {row.note}" if row.note else "")
    if row.effect in (table.REFUSED, table.LATER):
        raise OptionError(told)
    if row.effect == table.NO_EFFECT:
        reading.notes.append(told)
    elif row.to:
        ours, equals, fixed = row.to.partition("=")
        reading.put(ours, fixed if equals else value, written)


def _read_speculative_config(reading: Reading, name: str, value: Any, written: str) -> None:
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = None
    if not isinstance(given, Mapping):
        raise OptionError(f"{written} is not allowed; allowed: a dictionary, or its JSON")
    keys = [row.name.removeprefix(f"{name}.") for row in table.SPELLINGS if row.name.startswith(f"{name}.")]
    for key, inner in given.items():
        if key not in keys:
            raise OptionError(f"{name}: " + unknown_option(str(key), keys))
        if inner is not None:
            READERS.get(f"{name}.{key}", _by_table)(reading, f"{name}.{key}", inner, show(f"{name}.{key}", inner))


def _read_parallel(reading: Reading, name: str, value: Any, written: str) -> None:
    """It changes what a method means, so it waits until that is known."""
    if switch(value, written):
        reading.put("draft.parallel", True, written)


def _read_sampling(reading: Reading, name: str, value: Any, written: str) -> None:
    """Whether a temperature counts: yes or no, or PaddleNLP's words for it."""
    if name == "decode_strategy" and value not in STRATEGIES:
        _by_table(reading, name, value, written)
    else:
        said = switch(value, written) if name == "do_sample" else STRATEGIES[value]
        reading.put("do_sample", said, written)


def _read_ends(reading: Reading, name: str, value: Any, written: str) -> None:
    """Token ids: a number, a list, or text with commas; a stop_token that is no number is the text to stop at."""
    if name == "stop_token" and not str(value).isdecimal():
        reading.put("stop", value, written)
    else:
        given = value.split(",") if isinstance(value, str) else _listed(value)
        reading.put("stop_token_ids", [whole(token, written) for token in given], written)


def _read_length(reading: Reading, name: str, value: Any, written: str) -> None:
    """The one word that counts differently in the library and on the command line."""
    (row,) = table.named(name, reading.where)
    library = reading.where == table.LIBRARY  # where a notice that named each length would be said for each
    reading.notes.append(f"{name if library else written} {row.note}")
    reading.put(name if library else "max_tokens", value, written)


def _read_generation_config(reading: Reading, name: str, value: Any, written: str) -> None:
    """A dictionary, or transformers' object, of which only what differs from its defaults counts."""
    given = value.to_diff_dict() if hasattr(value, "to_diff_dict") else value
    if not isinstance(given, Mapping):
        raise OptionError(f"{written} is not allowed; allowed: a dictionary or a GenerationConfig")
    for key, inner in given.items():
        if inner is not None and key != "transformers_version" and not key.startswith("_"):
            reading.take(key, inner, show(f"{name}.{key}", inner))


READERS: dict[str, Callable[[Reading, str, Any, str], None]] = {
    "speculative_config": _read_speculative_config,
    "speculative_config.parallel_drafting": _read_parallel,
    # '[ngram]' and a model's name are two values of one thing.
    "speculative_model": lambda reading, name, value, written: reading.put("draft.model", value, written),
    "generation_config": _read_generation_config,
    "do_sample": _read_sampling,
    "decode_strategy": _read_sampling,
    "eos_token_id": _read_ends,
    "stop_token": _read_ends,
    "gpu": lambda reading, name, value, written: reading.put("device", f"cuda:{whole(value, written)}", written),
    "max_length": _read_length,
}
