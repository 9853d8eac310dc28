"""What users write after `--drafter`, read into a drafter's config.

    none | a word of the table of drafters | a model's name or path        any but none with options:
    ngram:max_match=3,min_match=1          draft:model=smollm2-135m,cross_vocabulary=true

The options are the fields of the drafter's own dataclass; nothing is listed twice.
"""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Sequence
from typing import Any

from paceline.compat.reading import switch, unknown_option
from paceline.compat.spec import split
from paceline.drafters import read_word, table
from paceline.drafters.table import LENGTH, NONE
from paceline.errors import OptionError

log = logging.getLogger("paceline")

# An option that stands beside `--drafter`: how it is called, and what is said where no drafter has any use for it.
BESIDE = {
    LENGTH: ("a draft length of {}", "has no effect without a drafter; --drafter suffix would bring one"),
    "quantization": ("a draft model's quantization {}", "has no effect: no draft model was given"),
    "max_match": ("a match of at most {} tokens", "applies to none of these drafters and is left out"),
    "min_match": ("a match of at least {} tokens", "applies to none of these drafters and is left out"),
}


def parse(spec: str) -> Any:
    """A drafter's config; None for `none`."""
    word, options = split(spec)
    if not word:
        raise OptionError(f"--drafter {spec!r} names no drafter; allowed: {table.words()}")
    if word == NONE:
        if options:
            raise OptionError(f"--drafter {spec!r}: none takes no options")
        return None
    kind, values = read_word(word)
    known = typing.get_type_hints(kind.config)
    hints = {name: known[name] for name in kind.options}
    for name, text in options.items():
        if not hints:
            raise OptionError(f"--drafter {spec!r}: {word} takes no options")
        if name not in hints:
            raise OptionError(f"--drafter {spec!r}: " + unknown_option(name, list(hints)))
        if name in values:
            raise OptionError(f"--drafter {spec!r} gives {name} twice; give it once")
        values[name] = _value(f"--drafter {spec!r}: {name}={text!r}", text, hints[name])
    return kind.make(values)


def settle(name: str, value: Any, specs: Sequence[str], configs: list[Any], quiet: bool = False) -> list[Any]:
    """The configs with an option that stands beside them, for those that have it and do not bring their own.

    quiet: nothing is said where it applies to none, nor refused where all of them bring another.
    """
    if value is None:
        return configs
    called, unused = BESIDE[name]
    told = called.format(value)
    _check(name, value, told)
    has = [name in table.options_of(config) for config in configs]
    free = [one and name not in split(spec)[1] for one, spec in zip(has, specs, strict=True)]
    if not any(has) and not quiet:
        log.warning("%s", f"{told} {unused}")
    for spec, config, one in zip(specs, configs, has):
        if one and not any(free) and getattr(config, name) != value and not quiet:
            raise OptionError(f"--drafter {spec} and {told} contradict each other; give one")
    return [dataclasses.replace(config, **{name: value}) if one else config for config, one in zip(configs, free)]


def _check(name: str, value: Any, told: str) -> None:
    """A value is refused whether or not a drafter takes it."""
    from paceline.kernels.quantise import check_quantization

    if name == "quantization":
        check_quantization(value)
    elif value < 1:
        raise OptionError(f"{told} is not allowed; allowed: 1 or more")


def combine(configs: list[Any]) -> Any:
    """What several `--drafter` mean to one engine: ask them in that order."""
    from paceline.drafters.first_of import FirstOf

    if len(configs) <= 1:
        return configs[0] if configs else None
    if any(config is None for config in configs):
        raise OptionError("--drafter none cannot stand beside another drafter")
    return FirstOf(*configs)


def _value(where: str, text: str, hint: Any) -> Any:
    """Text as the type a dataclass field declares; `Any` takes the text as it is."""
    kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)]
    if bool in kinds:
        return switch(text, where)
    for kind, meaning in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise OptionError(f"{where} is not allowed; allowed: {meaning}") from None
    return text
