"""What `--help` shows: flags at the left, what they mean beside them, nothing cut, in 80 columns.

Knows how a command declares its options. Must not know any of them by name.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import Any

NARROWEST, WIDEST, LEFT = 50, 100, 28  # columns; of these for flags
WORDS: dict[Any, str] = {int: "NUMBER", float: "NUMBER", list[int]: "NUMBER"}


def kind(option: Any) -> Any:
    """The type of an option's value."""
    return getattr(getattr(option, "type_descriptor", None), "annotation", None)


def write(command: Any, ctx: Any, formatter: Any) -> None:
    """Usage, what it does, then options by panel, or a group's commands."""
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    lines = textwrap.wrap(f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", width)
    for part in (command.help or "").split("\n\n"):
        typed = all(re.match(r"paceline |cat ", line) for line in part.splitlines())
        lines += ["", *([f"  {line}" for line in part.splitlines()] if typed else textwrap.wrap(part, width))]
    panels = _panels(command, ctx)
    side = min(LEFT, 2 + max(len(left) for rows in panels.values() for left, _ in rows))
    for panel, rows in panels.items():
        lines += ["", f"{panel}:", *(line for row in rows for line in _row(*row, side, width))]
    lines += ["", *textwrap.wrap(command.epilog, width)] if command.epilog else []
    formatter.write("\n".join(lines) + "\n")


def _panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """What stands at the left and what beside it, by panel."""
    panels: dict[str, list[tuple[str, str]]] = {}
    if hasattr(command, "commands"):
        panels["Commands"] = [(name, inner.help.split("\n\n")[0]) for name, inner in command.commands.items()]
    for option in command.get_params(ctx):
        panel = getattr(option, "rich_help_panel", None) or (
            "Options" if option.param_type_name == "option" else "Arguments"
        )
        panels.setdefault(panel, []).append((_left(option), _meaning(option)))
    return panels


def _left(option: Any) -> str:
    """Its flags, and a word for its value; an argument's name."""
    if option.param_type_name == "argument":
        return str(option.metavar or option.name.upper())
    flags = ", ".join(sorted((flag for flag in option.opts if flag.strip()), key=len))
    flags = " / ".join(part for part in (flags, ", ".join(option.secondary_opts)) if part)
    return flags if option.is_flag else f"{flags} {option.metavar or WORDS.get(kind(option), 'NAME')}"


def _meaning(option: Any) -> str:
    told, default = " ".join((option.help or "").split()), option.default
    if option.required or default is None or isinstance(default, bool | list | tuple) or option.show_default is False:
        return told
    return f"{told} [default: {f'{default:g}' if isinstance(default, float) else default}]"


def _row(left: str, meaning: str, side: int, width: int) -> list[str]:
    """What is too long for its side has a line of its own."""
    first, *others = textwrap.wrap(meaning, width - side - 2, break_on_hyphens=False) or [""]
    alone = [f"  {left}"] if len(left) + 2 > side else []
    begin = "" if alone else f"  {left}"
    return [*alone, f"{begin:<{side}}  {first}".rstrip(), *(f"{'':<{side}}  {line}" for line in others)]
