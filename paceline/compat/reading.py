"""From spellings to our options, one at a time: `Reading` takes what a user gave and holds it in our words.

What two spellings say of one option has to agree. This module knows the table and how a value is read; it must not know
where options go afterwards.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline.compat import table
from paceline.compat.table import Spelling
from paceline.errors import OptionError

log = logging.getLogger("paceline")

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
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
        """One option under any of its names; None is as good as not given."""
        if name in self.own:
            self.put("draft.num_draft_tokens" if name == "num_draft_tokens" else name, value, written)
            return
        rows = table.named(name, self.where)
        if not rows:
            known = [*self.own, *table.names(self.where)]
            raise OptionError(unknown_option(name, known))
        if value is None:
            return
        self.names.add(name)
        READERS.get(name, _by_table)(self, name, value, written)

    def put(self, ours: str, value: Any, written: str) -> None:
        """A value for an option of ours; another one that differs is refused, naming both."""
        if ours in MANY:
            value = [*(self.get(ours) or ()), *_listed(value)]
            self._found[ours] = (value, written)
            return
        before, first = self._found.get(ours, (None, ""))
        if before is not None and value is not None and before != value:
            raise OptionError(f"{first} and {written} contradict each other; give one")
        if before is None:
            self._found[ours] = (value, written)

    def get(self, ours: str) -> Any:
        return self._found.get(ours, (None, ""))[0]

    def written(self, ours: str) -> str:
        return self._found[ours][1]

    def pop(self, ours: str) -> Any:
        return self._found.pop(ours, (None, ""))[0]

    def found(self) -> dict[str, Any]:
        """All but the drafter's options."""
        return {ours: value for ours, (value, _) in self._found.items() if not ours.startswith("draft.")}

    def parts(self) -> dict[str, Any]:
        """The drafter's options."""
        pairs = ((ours, value) for ours, (value, _) in self._found.items() if value is not None)
        return {ours.removeprefix("draft."): value for ours, value in pairs if ours.startswith("draft.")}


def unknown_option(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """One sentence that names the nearest known option; where none is near, all of them or what `otherwise` says."""
    listed = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, listed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else otherwise or f"known: {', '.join(sorted(listed))}"
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


# One spelling's value: what the table says, or a rule of its own.


def _by_table(reading: Reading, name: str, value: Any, written: str) -> None:
    rows = table.named(name, reading.where)
    exact = [row for row in rows if row.value and row.value == (value if isinstance(value, str) else repr(value))]
    general = [row for row in rows if not row.value]
    if not exact and not general:
        if value == "":  # how PaddleNLP writes "none"
            return
        allowed = ", ".join(row.value for row in rows if row.effect in (table.SAME, table.RENAMED))
        raise OptionError(f"{written} is not known; allowed: {allowed}")
    _apply(reading, (exact or general)[0], value, written)


def _apply(reading: Reading, row: Spelling, value: Any, written: str) -> None:
    reason = f"; {row.note}" if row.note else ""
    if row.effect == table.NO_EFFECT:
        reading.notes.append(f"{written} has no effect here{reason}")
    elif row.effect == table.REFUSED:
        raise OptionError(f"{written} is not supported{reason}")
    elif row.effect == table.LATER:
        raise OptionError(f"{written} is not there yet{reason}")
    elif row.to:
        ours, equals, fixed = row.to.partition("=")
        reading.put(ours, fixed if equals else value, written)


def _read_speculative_config(reading: Reading, name: str, value: Any, written: str) -> None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise OptionError(f"{show(name, value)} is not allowed; allowed: a dictionary, or its JSON") from None
    if not isinstance(value, Mapping):
        raise OptionError(f"{show(name, value)} is not allowed; allowed: a dictionary, or its JSON")
    keys = [row.name for row in table.SPELLINGS if row.name.startswith(f"{name}.")]
    for key, inner in value.items():
        full = f"{name}.{key}"
        if full not in keys:
            raise OptionError(f"{name}: " + unknown_option(str(key), [k.removeprefix(f"{name}.") for k in keys]))
        if inner is not None:
            _by_table(reading, full, inner, show(full, inner))


def _read_model(reading: Reading, name: str, value: Any, written: str) -> None:
    reading.put("draft.model", value, written)  # '[ngram]' and a model's name are two values of one thing


def _read_do_sample(reading: Reading, name: str, value: Any, written: str) -> None:
    reading.put("do_sample", switch(value, written), written)


def _read_strategy(reading: Reading, name: str, value: Any, written: str) -> None:
    if value in ("sampling", "greedy_search"):
        reading.put("do_sample", value == "sampling", written)
    else:
        _by_table(reading, name, value, written)


def _read_ends(reading: Reading, name: str, value: Any, written: str) -> None:
    """Token ids: a number, a list, or text with commas."""
    given = value.split(",") if isinstance(value, str) else _listed(value)
    reading.put("stop_token_ids", [whole(token, written) for token in given], written)


def _read_stop_token(reading: Reading, name: str, value: Any, written: str) -> None:
    """A number is a token id, anything else the text to stop at."""
    is_id = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
    reading.put("stop_token_ids" if is_id else "stop", [whole(value, written)] if is_id else [value], written)


def _read_gpu(reading: Reading, name: str, value: Any, written: str) -> None:
    import torch

    number = whole(value, written)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= number < count:
        seen = f"PyTorch sees {count or 'no'} CUDA device{'' if count == 1 else 's'} here"
        raise OptionError(f"{written} means the device cuda:{number}, but {seen}; leave it out to take what there is")
    reading.put("device", f"cuda:{number}", written)


def _read_length(reading: Reading, name: str, value: Any, written: str) -> None:
    """The one word that counts differently in the library and on the command line."""
    (row,) = table.named(name, reading.where)
    library = reading.where == table.LIBRARY  # where a notice that named each length would be said for each
    reading.notes.append(f"{name if library else written} {row.note}")
    reading.put(name if library else "max_tokens", value, written)


def _read_count(reading: Reading, name: str, value: Any, written: str) -> None:
    """A number of which the table allows one; `True` and `1.0` are none."""
    _by_table(reading, name, whole(value, written), written)


def _read_switch(reading: Reading, name: str, value: Any, written: str) -> None:
    _by_table(reading, name, switch(value, written), written)


def _read_generation_config(reading: Reading, name: str, value: Any, written: str) -> None:
    """A dictionary, or transformers' object, of which only what differs from its defaults counts."""
    given = value.to_diff_dict() if hasattr(value, "to_diff_dict") else value
    if not isinstance(given, Mapping):
        raise OptionError(f"{show(name, value)} is not allowed; allowed: a dictionary or a GenerationConfig")
    for key, inner in given.items():
        if inner is not None and key != "transformers_version" and not key.startswith("_"):
            reading.take(key, inner, show(f"{name}.{key}", inner))


Reader = Callable[[Reading, str, Any, str], None]
READERS: dict[str, Reader] = {
    "speculative_config": _read_speculative_config,
    "speculative_model": _read_model,
    "generation_config": _read_generation_config,
    "do_sample": _read_do_sample,
    "decode_strategy": _read_strategy,
    "eos_token_id": _read_ends,
    "stop_token": _read_stop_token,
    "gpu": _read_gpu,
    "max_length": _read_length,
    "num_beams": _read_count,
    "beam_width": _read_count,
    "speculative_draft_tensor_parallel_size": _read_count,
    "use_glide_drafter": _read_switch,
    "glimpse_large_kv": _read_switch,
    "ignore_eos": _read_switch,
    "enable_prefix_caching": _read_switch,
}
