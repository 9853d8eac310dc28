"""What users write after `--drafter`, read into a drafter's config.

    none | ngram | suffix | a model's name or path          or any of these but none with options:
    ngram:max_match=3,min_match=1          draft:model=smollm2-135m,cross_vocabulary=true

The options are the fields of the drafter's own dataclass; nothing is listed twice.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from paceline.errors import OptionError

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse(spec: str) -> Any:
    """A drafter's config; None for `none`."""
    from paceline.compat import unknown_option
    from paceline.drafters import make
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.ngram import NGram
    from paceline.drafters.suffix import Suffix

    word, options = split(spec)
    if not word:
        raise OptionError(f"--drafter {spec!r} names no drafter; allowed: none, ngram, suffix, a model's name or path")
    if not options and word != "draft":
        return make(word)
    if word == "none":
        raise OptionError(f"--drafter {spec!r}: none takes no options")
    kinds: dict[str, type] = {"ngram": NGram, "suffix": Suffix}
    kind = kinds.get(word, DraftModel)
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {} if word in (*kinds, "draft") else {"model": word}
    for name, text in options.items():
        if name not in hints:
            raise OptionError(f"--drafter {spec!r}: " + unknown_option(name, list(hints)))
        if name in values:
            raise OptionError(f"--drafter {spec!r} gives {name} twice; give it once")
        values[name] = _value(f"--drafter {spec!r}: {name}={text!r}", text, hints[name])
    if kind is DraftModel and "model" not in values:
        raise OptionError(f"--drafter {spec!r} needs a model; write draft:model=NAME")
    return kind(**values)


def split(spec: str) -> tuple[str, dict[str, str]]:
    """The word, and its options. A colon that no key=value follows belongs to the word: it may be a path."""
    word, colon, rest = spec.rpartition(":")
    if not colon or "=" not in rest:
        return spec.strip(), {}
    options: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, text = part.partition("=")
        name = name.strip()
        if not equals or not name:
            raise OptionError(f"--drafter {spec!r}: {part!r} is not key=value")
        if name in options:
            raise OptionError(f"--drafter {spec!r} gives {name} twice; give it once")
        options[name] = text.strip()
    return word.strip(), options


def with_num_draft_tokens(config: Any, count: int | None) -> Any:
    """The same config with another draft length, if one was asked for."""
    if count is None or config is None:
        return config
    return dataclasses.replace(config, num_draft_tokens=count)


def with_quantization(config: Any, quantization: str | None) -> Any:
    """The same config, a draft model's weights packed at load, if that was asked for."""
    from paceline.drafters.draft_model import DraftModel

    if quantization is None or not isinstance(config, DraftModel):
        return config
    return dataclasses.replace(config, quantization=quantization)


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
        if text.lower() not in TRUE + FALSE:
            raise OptionError(f"{where} is not allowed; allowed: true or false")
        return text.lower() in TRUE
    for kind, meaning in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise OptionError(f"{where} is not allowed; allowed: {meaning}") from None
    return text
