"""What can be typed after a slash in `paceline chat`: each command's name, its argument, and what it does.

A command answers with a sentence, or raises a PacelineError, which the chat says and goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from paceline.drafters import table
from paceline.errors import OptionError, nearest

if TYPE_CHECKING:
    from paceline.cli.talk import Talk


class Slash(NamedTuple):
    argument: str
    meaning: str
    act: Callable[[Talk, str], str | None]


def obey(talk: Talk, line: str) -> str | None:
    """Do what a line that begins with a slash says; returns what to answer."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = nearest(name, [*COMMANDS, *ALIASES])
        hint = f"did you mean /{near}?" if near else f"/help lists them, and //{name} says it to the model"
        raise OptionError(f"/{name} is not a command; {hint}")
    return command.act(talk, argument.strip())


def _drafter(talk: Talk, argument: str) -> str:
    if not argument:
        return f"drafter: {talk.drafter_name}; /drafter with {table.words()} changes it"
    talk.set_drafter(argument.split())
    return "\n".join([f"drafter: {talk.drafter_name}", *talk.legend(["accepted"])])


def _temperature(talk: Talk, argument: str) -> str:
    if argument:
        try:
            value = float(argument)
        except ValueError:
            raise OptionError(f"/temperature {argument!r} is no number; type one, such as /temperature 0.7") from None
        talk.params = dataclasses.replace(talk.params, temperature=value)
    return f"temperature: {talk.params.temperature:g}" + (" (the likeliest token)" if talk.params.greedy else "")


def _template(talk: Talk, argument: str) -> str:
    if argument:
        talk.conversation.set_template(argument)
    names = {"own": "the model's own", "none": "none, your text is completed as it is"}
    return f"template: {names.get(talk.conversation.template, talk.conversation.template)}"


def _system(talk: Talk, argument: str) -> str:
    if argument:
        talk.conversation.set_system(None if argument == "none" else argument)
    said = talk.conversation.system
    return "no system message" if said is None else f"system message: {said}"


def _reset(talk: Talk, argument: str) -> str:
    talk.conversation.messages.clear()
    return "the conversation begins anew"


def _stats(talk: Talk, argument: str) -> str:
    return "\n".join(talk.report())


def _help(talk: Talk, argument: str) -> str:
    rows = [(f"/{name} {command.argument}".strip(), command.meaning) for name, command in COMMANDS.items()]
    rows += [
        ("Ctrl-C", "stop the answer; what was said stays"),
        ("\\ at the end", "the message goes on in the next line"),
    ]
    lines = [f"  {left:<24} {right}" for left, right in rows]
    return "\n".join([*lines, "", *talk.legend()]).rstrip()


def _quit(talk: Talk, argument: str) -> None:
    talk.ended = True


COMMANDS = {
    "drafter": Slash("SPEC", f"{table.NONE}, ngram, suffix, a model …; several in order", _drafter),
    "temperature": Slash("X", "0 takes the likeliest token", _temperature),
    "template": Slash("NAME", "own, none, llama, vicuna, a Jinja file", _template),
    "system": Slash("TEXT", "the system message; none for no message", _system),
    "reset": Slash("", "forget the conversation", _reset),
    "stats": Slash("", "what all answers took", _stats),
    "help": Slash("", "this", _help),
    "quit": Slash("", "end the chat, as Ctrl-D does", _quit),
}
ALIASES = {"exit": "quit", "q": "quit", "?": "help", "temp": "temperature", "clear": "reset"}
