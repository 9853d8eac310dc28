"""What commands take: options made from a dataclass's fields, and the few that several commands share beside these.

A field's name is the flag (of a list its singular, given once for each item), its type the value, its line in the
class's docstring the help. So a field that is added there is an option here. This module must not know any field but
those that a command leaves out or sets for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from paceline.drafters import table
from paceline.engine.options import EngineOptions
from paceline.errors import OptionError
from paceline.models.catalog import DEFAULT_MODEL
from paceline.params import SamplingParams

DRAFTING, SAMPLING, PROMPT, SHOWING, MACHINE = "Drafting", "Sampling", "Prompt", "Showing", "Model and machine"
MEASURING, FILES = "Measuring", "Files"
PANELS = (PROMPT, "Serving", DRAFTING, SAMPLING, MEASURING, FILES, SHOWING, MACHINE)  # of `--help`, in that order

Group = Mapping[str, tuple[Any, Any]]  # an option's name → its annotation and default


def option(panel: str, text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, **more)


def takes(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with further options. It finds all of them in its context; those of its signature it gets as well."""

    def widen(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def widened(**given: Any) -> None:
            command(**{name: given[name] for name in own})

        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for group in groups
            for name, (annotation, default) in group.items()
        ]
        alone = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own.values()]
        found = sorted([*alone, *shared], key=_place)
        widened.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        return widened

    return widen


def _place(parameter: inspect.Parameter) -> int:
    """By panel; what has none stands first."""
    info: Any = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
    panel = getattr(info, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


SEVERAL = " May be given several times."


# From a dataclass to options, and from what was given back to its fields


def of(kind: type, panel: str, names: Iterable[str], **defaults: Any) -> dict[str, tuple[Any, Any]]:
    """Options from fields; `defaults` are the command's where it has its own."""
    fields, hints, told = (
        {item.name: item for item in dataclasses.fields(kind)},
        typing.get_type_hints(kind),
        lines(kind),
    )
    group = {}
    for name in names:
        default = defaults.get(name, fields[name].default)
        value, flag, more = _reading(name, hints[name], default)
        flag = fields[name].metadata.get("flag", flag)
        text = told[name][0].upper() + told[name][1:]
        if flag.startswith(" /"):  # there is but the flag that turns it off
            text = f"Do not {told[name]}"
        group[name] = (Annotated[value, option(panel, f"{text}{more.pop('also', '')}", flag, **more)], default)
    return group


def fields_but(kind: type, *without: str) -> list[str]:
    return [item.name for item in dataclasses.fields(kind) if item.init and item.name not in without]


def lines(kind: type) -> dict[str, str]:
    """What a class's docstring says of each field: a line `name: …`, and the lines after it."""
    names, told, current = {item.name for item in dataclasses.fields(kind)}, {}, ""
    for line in (inspect.getdoc(kind) or "").splitlines():
        found = re.match(r"(\w+): (.*)", line)
        if found and found[1] in names:
            current, told[found[1]] = found[1], found[2]
        elif current and line:
            told[current] += f" {line.strip()}"
        else:
            current = ""
    return told


def _reading(name: str, hint: Any, default: Any) -> tuple[Any, str, dict[str, Any]]:
    """How a field is typed in: its type, its flag, and what else its option says."""
    flag, item = "--" + name.replace("_", "-"), _item(hint)
    if item is Mapping:
        return list[str] | None, flag, {"metavar": "ID=NUMBER", "also": SEVERAL}
    if item is str:
        return list[str] | None, flag.removesuffix("s"), {"metavar": "TEXT", "also": rf" \n is a line break.{SEVERAL}"}
    if item is int:
        return list[int] | None, flag.removesuffix("s"), {"metavar": "NUMBER", "also": SEVERAL}
    if hint is bool:
        return bool, f" /--no-{flag.removeprefix('--')}" if default else flag, {"show_default": False}
    return hint, flag, {}


def _item(hint: Any) -> Any:
    """What a list's option is given once for each: int, str, or a pair; None for what is no list."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for part in parts:
        if typing.get_origin(part) is Mapping:
            return Mapping
        if typing.get_origin(part) is Sequence:
            return int if typing.get_args(part) == (int,) else str
    return None


def read(kind: type, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass among a command's options, as far as they have a value."""
    hints, values = typing.get_type_hints(kind), {}
    for name in fields_but(kind):
        value = chosen.get(name)
        if value is None or value == ():
            continue
        item = _item(hints[name])
        if item is Mapping:
            value = dict(_pair(name, text) for text in value)
        elif item is str and not isinstance(value, str):
            value = [text.replace("\\n", "\n").replace("\\t", "\t") for text in value]
        values[name] = list(value) if isinstance(value, tuple) else value
    return values


def _pair(name: str, text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        flag = "--" + name.replace("_", "-")
        raise OptionError(f"{flag} {text} is not allowed; allowed: a token id and a number, as in 42=-5") from None


# Groups


def sampling(*without: str, **defaults: Any) -> Group:
    """Sampling parameters. A command serves one request at a time, so --num-draft-tokens says what one may draft."""
    names = fields_but(
        SamplingParams, "max_draft_tokens", "prompt_logprobs", "logits_processors", "detokenize", *without
    )
    return of(SamplingParams, SAMPLING, names, **{"temperature": 0.0, **defaults})


def machine(*without: str, also: tuple[str, ...] = ()) -> Group:
    """The model, and the engine's options that a command does not settle itself; those in `also` few commands leave."""
    settled = {"prompt_template", "default_max_tokens", "seed", "max_num_seqs", "prefix_caching"} - {*also}
    settled.add("skip_tokenizer_init")  # commands read and write text
    where = "A name from `paceline models`, a folder, a .gguf file or a hub id."
    model = {"model": (Annotated[str, option(MACHINE, where)], DEFAULT_MODEL)}
    rule = of(EngineOptions, DRAFTING, {"acceptance"} - {*without})
    return {**model, **rule, **of(EngineOptions, MACHINE, fields_but(EngineOptions, *settled, "acceptance", *without))}


def drafter_help() -> str:
    """Every word after `--drafter` that drafts."""
    told = [f"{kind.word} ({kind.does})" for kind in table.loadable()]
    return f"{', '.join(told)}, with options as in ngram:max_match=3,min_match=1."


ORDER = "Several are asked in that order. The text is the same with every drafter."
DRAFTER = Annotated[list[str] | None, option(DRAFTING, f"{table.NONE}, {drafter_help()} {ORDER}", metavar="SPEC")]
COUNT = "The most tokens drafted in a round, where --drafter does not say it; else its default."
QUANTIZED = "Pack a draft model's float weights at load, as int8 or int4 (on a GPU int8), whatever the target's are."
QUANTIZATION: Group = {"drafter_quantization": (Annotated[str | None, option(DRAFTING, QUANTIZED)], None)}
DRAFTERS: Group = {
    "drafter": (DRAFTER, None),
    "num_draft_tokens": (Annotated[int | None, option(DRAFTING, COUNT)], None),
    **QUANTIZATION,
}

CHAT = option(
    PROMPT, "Use the chat template or not; by default where the model has one.", "--chat/--raw", show_default=False
)
TEMPLATES = "llama, vicuna, a Jinja file, or a text with {input_text} in it, instead of the model's own chat template."
TEMPLATE: Group = {
    "prompt_template": (Annotated[str | None, option(PROMPT, TEMPLATES, "--template", metavar="NAME")], None)
}
CHAT_OR_RAW: Group = {"chat": (Annotated[bool | None, CHAT], None), **TEMPLATE}
SAID_FIRST = "The system message, before the first question."
SYSTEM: Group = {"system": (Annotated[str | None, option(PROMPT, SAID_FIRST, metavar="TEXT")], None)}

COLOURS = option(SHOWING, "Colours or none; by default on a terminal.", "--color/--no-color", show_default=False)
COLOR: Group = {"color": (Annotated[bool | None, COLOURS], None)}
