"""How every command reads its words: hyphens or underscores, our flags or another system's.

    --max_new_tokens=512   →   --max-tokens 512

A flag that the command declares is the command's, whatever it means elsewhere; the others go to `paceline.compat`,
which answers with ours. So a command never sees a foreign word, and nothing is said in two ways without an error.
This module knows how flags are written. It must not know what any of them means.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup

from paceline import compat
from paceline.cli import help
from paceline.compat import Flag, table
from paceline.compat.reading import switch
from paceline.errors import OptionError, nearest

EPILOG = (
    "Hyphens and underscores are the same in a flag's name. The flags of vLLM, LMFlow, Colossal-Inference and "
    "PaddleNLP are understood too: docs/coming-from has a table for each."
)
EXTRA = "pip install 'paceline[server]', in a clone '.[server]'"
END = "--"  # after it everything is an argument
AFTER_SWITCH = ("true", "false", "True", "False")  # the only words that are a value there
OFF = "off"  # the value of a switch for which there is no flag that says no
WHOLE: tuple[type, str] = (int, "a whole number")
NUMBERS: dict[Any, tuple[type, str]] = {int: WHOLE, list[int]: WHOLE, float: (float, "a number")}


def need(who: str, *modules: str) -> None:
    """Modules that come with the extra for servers."""
    missing = next((name for name in modules if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise OptionError(f"{who} needs {missing}, which is not installed: {EXTRA}")


class Command(TyperCommand):
    """A command that understands every spelling of its flags, and refuses a value under the name that was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        declared = {flag: option for option in self.get_params(ctx) for flag in _flags_of(option)}
        with said_in_a_sentence(ctx):
            return super().parse_args(ctx, rewrite(args, declared, ctx.command_path))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OptionError as error:
            raise OptionError(_as_typed(str(error), ctx)) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        help.write(self, ctx, formatter)


class Group(TyperGroup):
    """Commands under one name; one that is not there is refused with the nearest, or with what `elsewhere` says."""

    elsewhere: ClassVar[Mapping[str, str]] = {}  # what other systems call so, and what there is instead

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with said_in_a_sentence(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        word = name.replace("-", "_")
        if word in self.elsewhere:
            raise OptionError(f"{ctx.command_path} {name} {self.elsewhere[word]}")
        near = nearest(name, self.commands)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(self.commands)}"
        raise OptionError(f"{ctx.command_path} has no command {name!r}; {hint}")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        help.write(self, ctx, formatter)


@contextlib.contextmanager
def said_in_a_sentence(ctx: Any) -> Iterator[None]:
    """What the parser refuses, as everything else is refused. Which parser raises it differs by typer's version."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        text = message().rstrip(".")
        extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text)
        text = f"{extra[1]!r} is one argument too many" if extra else text[:1].lower() + text[1:]
        raise OptionError(f"{text}; see {ctx.command_path} --help") from None


def is_given(ctx: Any, name: str) -> bool:
    """Whether an option was typed rather than left at its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _as_typed(text: str, ctx: Any) -> str:
    """`top_p=2.0 is not allowed` where --top-p was typed; what stands inside a drafter's text is left."""
    given = [option for option in ctx.command.params if is_given(ctx, option.name)]
    flags = {option.name: flag for option in given for flag in option.opts if flag.startswith("--")}
    named = re.compile(r"(?<![\w:,'(])(\w+)=(?=\S)")
    return named.sub(lambda found: f"{flags[found[1]]} " if found[1] in flags else found[0], text)


def rewrite(words: list[str], declared: Mapping[str, Any], command: str) -> list[str]:
    """The same words with every flag as the command declares it."""
    own, foreign, rest = _read(words, declared, command)
    given = compat.rewrite_flags(foreign, own, declared, command)
    for flag in given:
        _check_number(flag, help.kind(declared[flag.name]))
    _refuse_two_values(given, declared)
    return [*(word for flag in _said(given, declared) for word in flag.words()), *rest]


def _flags_of(option: Any) -> list[str]:
    """Its flags, those that say no included; an argument has none."""
    return [flag for flag in (*option.opts, *option.secondary_opts) if flag.startswith("-")]


def _read(words: list[str], declared: Mapping[str, Any], command: str) -> tuple[list[Flag], list[Flag], list[str]]:
    """The command's own flags, the others, and what is no long flag."""
    own: list[Flag] = []
    foreign: list[Flag] = []
    rest: list[str] = []
    arguments: list[str] = []  # that other systems give as flags
    left = list(words)
    while left and left[0] != END:
        word = left.pop(0)
        typed, equals, value = word.partition("=")
        name = table.SHORT.get(typed, typed).replace("_", "-")
        if not name.startswith("--"):
            rest.append(_no_flag(word, declared))
            continue
        takes = _takes(declared[name]) if name in declared else compat.takes_value(name, declared, command)
        if equals:
            flag = Flag(name, value, f"{typed} {value}")
        elif left and takes(left[0]):
            flag = Flag(name, left[0], f"{typed} {left.pop(0)}")
        else:
            flag = Flag(name, None, typed)
        if name in declared:
            own.append(_checked(flag, declared[name]))
        elif flag.option in table.ARGUMENTS and flag.value is not None:
            arguments.append(flag.value)
        else:
            foreign.append(flag)
    after = [*arguments, *left[1:]]
    return own, foreign, [*rest, *([END, *after] if left or after else [])]


def _no_flag(word: str, declared: Mapping[str, Any]) -> str:
    """A word that is no long flag; a short one that the command does not have is refused."""
    if word.startswith("-") and word != "-" and word[:2] not in declared:
        after = f"an argument that begins with one goes after {END}"
        raise OptionError(f"option {word!r} is not known: flags begin with two hyphens; {after}")
    return word


def _takes(option: Any) -> Callable[[str], bool]:
    """Whether a word that follows the flag is its value. After a switch many a word is the prompt's own."""
    if option.count:
        return lambda word: False
    return lambda word: word in AFTER_SWITCH or not option.is_flag


def _checked(flag: Flag, option: Any) -> Flag:
    """A flag of the command's own with the value it needs; a switch with a value as the flag that says the same."""
    if option.count:
        return flag
    if not option.is_flag:
        if flag.value is None:
            raise OptionError(f"{flag.written} needs a value")
        return flag
    if flag.value is None or switch(flag.value, flag.written):
        return Flag(flag.name, None, flag.written)
    others = option.secondary_opts if flag.name in option.opts else option.opts
    off = [name for name in others if name.startswith("--")]
    return Flag(off[0], None, flag.written) if off else Flag(flag.name, OFF, flag.written)


def _check_number(flag: Flag, kind: Any) -> None:
    read, allowed = NUMBERS.get(kind, (str, ""))
    try:
        read(flag.value or 0)
    except ValueError:
        raise OptionError(f"{flag.written} is not allowed; allowed: {allowed}") from None


def _said(given: list[Flag], declared: Mapping[str, Any]) -> list[Flag]:
    """What the command is told. Of a switch the last word counts, and one that is off is not mentioned."""
    last = {declared[flag.name].name: flag for flag in given}
    return [
        flag
        for flag in given
        if not declared[flag.name].is_flag or (last[declared[flag.name].name] is flag and flag.value != OFF)
    ]


def _refuse_two_values(given: Iterable[Flag], declared: Mapping[str, Any]) -> None:
    """One option said in two ways, differently: no value is silently the one that counts.

    The same flag written twice is another matter: there the last one counts, as everywhere.
    """
    said: dict[str, dict[str, tuple[str, str]]] = {}  # option → flag as written → its value
    for flag in given:
        option = declared[flag.name]
        if not (option.multiple or option.count):
            value = flag.name + (flag.value or "") if option.is_flag else str(flag.value)
            said.setdefault(option.name, {})[flag.written.split(" ")[0]] = (value, flag.written)
    for ways in said.values():
        (value, first), *others = ways.values()
        for other, second in others:
            if not _same(value, other):
                raise OptionError(f"{first} and {second} contradict each other; give one")


def _same(one: str, other: str) -> bool:
    """As text, or as numbers: 0 is 0.0."""
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False
