"""Writes docs/reference.md from the code: every public class, option and command, with types and defaults.

    python docs/reference.py            rewrite the page
    python docs/reference.py --check    change nothing; say whether it is out of date

Names, types, defaults and help come from the code. What an option means is told once, in the table of its own page, and
taken from there; a test holds those tables to the code. Knows where the tables are; must not know any option by name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Reference

Every public name, option and command. This page is written by `python docs/reference.py` from the code.
"""
METHODS = ("generate", "chat", "stream", "score", "set_drafter", "get_tokenizer", "read_chat")
PACE = ("add", "step", "abort", "close")
AWAITED = ("stream", "generate", "chat", "score", "abort", "set_drafter", "get_tokenizer", "close")


def page() -> str:
    """The whole page."""
    from paceline import LLM, AsyncLLM, FirstOf, SamplingParams, errors
    from paceline.cli import app
    from paceline.drafters.table import loadable
    from paceline.engine.sequence import Logprob, Provenance
    from paceline.engine.stats import SequenceStats
    from paceline.llm import EngineOptions
    from paceline.outputs import Chunk, CompletionOutput, RequestOutput, Score

    parts = [HEAD, "## The library\n", callable_section("LLM", LLM)]
    parts += [method(LLM, name) for name in METHODS + PACE]
    parts += [callable_section("AsyncLLM", AsyncLLM), *(method(AsyncLLM, name) for name in AWAITED)]
    parts.append(options("EngineOptions", EngineOptions, ("engine.md", "Options")))
    parts.append(options("SamplingParams", SamplingParams, ("sampling.md", "Parameters")))
    parts.append("## Drafters\n")
    for kind in loadable():
        parts.append(options(kind.config.__name__, kind.config, (f"drafters/{kind.page}.md", "Options")))
    parts.append(callable_section("FirstOf", FirstOf) + "\nMore on [its page](drafters/first-of.md).\n")
    parts.append("## What comes back\n")
    parts += [
        fields(kind) for kind in (RequestOutput, CompletionOutput, Chunk, Score, SequenceStats, Provenance, Logprob)
    ]
    parts.append("## Errors\n\n" + error_table(errors))
    parts.append("## Commands\n\n" + commands(typer.main.get_command(app), "paceline"))
    return "\n".join(parts).rstrip() + "\n"


# Classes


def callable_section(name: str, kind: Any) -> str:
    """A class that is called: how, and what its docstring says."""
    return f"### {name}\n\n```text\n{name}{signature(kind)}\n```\n\n{paragraphs(kind)}\n"


def method(kind: Any, name: str) -> str:
    function = getattr(kind, name)
    return f"#### {kind.__name__}.{name}\n\n```text\n{name}{signature(function)}\n```\n\n{paragraphs(function)}\n"


def signature(function: Any) -> str:
    """Parameters and what comes back; one a line where they would run too wide."""
    found = inspect.signature(function)
    listed = [spelled(item) for item in found.parameters.values() if item.name != "self"]
    back = found.return_annotation
    ends = ")" if back in (inspect.Signature.empty, None, "None") else f") -> {back}"
    told = f"({', '.join(listed)}{ends}"
    return told if len(told) <= 90 else "(\n" + "".join(f"    {item},\n" for item in listed) + ends


def spelled(item: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(item.kind, "")
    default = "" if item.default is item.empty else f" = {item.default!r}".replace("'", '"')
    return f"{stars}{item.name}: {item.annotation}{default}"


def paragraphs(thing: Any) -> str:
    """A docstring as Markdown: lines that begin with `name:` become the items of a list."""
    told: list[str] = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        item = re.match(r"(\w+): (.*)", line)
        inside = bool(told) and told[-1].startswith(("* ", "  "))
        if told and told[-1] and bool(item) != inside and (item or told[-1].endswith(".")):
            told.append("")
            inside = False
        told.append(f"* `{item[1]}`: {item[2]}" if item else f"  {line}" if inside and line else line)
    return "\n".join(told)


def options(name: str, kind: Any, where: tuple[str, str]) -> str:
    """A dataclass of options, with the meanings its own page gives."""
    meanings = told_on(*where)
    rows = []
    for item in dataclasses.fields(kind):
        if item.init:
            default = "required" if item.default is dataclasses.MISSING else f"`{item.default!r}`".replace("'", '"')
            rows.append([f"`{item.name}`", f"{type_words(item.type)}, {default}", meanings.get(item.name, "")])
    doc = (inspect.getdoc(kind) or "").splitlines()[0]
    heads = ["option", "type and default", "meaning"]
    return f"### {name}\n\n{doc} More on [its page]({where[0]}).\n\n{table(heads, rows)}"


def told_on(page: str, heading: str) -> dict[str, str]:
    """The last column of a page's table of options, by name; its links lead from docs/ here."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    under = re.split(rf"^##+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \|(?:.*\|)? (.*) \|$", under, flags=re.MULTILINE)
    return {name: re.sub(r"\]\(([^)]+)\)", lambda link: f"]({moved(page, link[1])})", told) for name, told in rows}


def moved(page: str, link: str) -> str:
    """A link of a page, as it reads on this one."""
    target, mark, heading = link.partition("#")
    path = (Path(page).parent / target if target else Path(page)).as_posix()
    while re.search(r"[^/]+/\.\./", path):
        path = re.sub(r"[^/]+/\.\./", "", path, count=1)
    return path + mark + heading


def fields(kind: Any) -> str:
    """A dataclass of results: its fields and properties, with the meanings that docs/engine.md gives."""
    meanings = told_on("engine.md", kind.__name__)
    types = {item.name: item.type for item in dataclasses.fields(kind)}
    for name, member in vars(kind).items():
        if isinstance(member, property) and member.fget is not None:
            types[name] = inspect.signature(member.fget).return_annotation
    rows = [[f"`{name}`", type_words(hint), meanings.get(name, "")] for name, hint in types.items()]
    about = " ".join((inspect.getdoc(kind) or "").split())
    return f"### {kind.__name__}\n\n{about}\n\n{table(['field', 'type', 'meaning'], rows)}"


def type_words(annotation: Any) -> str:
    """A type without the bar that would end a table's cell."""
    words = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return words.replace(" | ", " or ")


def error_table(module: Any) -> str:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return table(["error", "when"], [[f"`{kind.__name__}`", inspect.getdoc(kind) or ""] for kind in kinds])


# Commands


KINDS = {
    str: "text",
    int: "whole number",
    float: "number",
    Path: "path",
    bool: "flag",
    list[str]: "text",
    list[int]: "whole number",
    list[float]: "number",
    list[Path]: "path",
}


@functools.cache
def flags() -> frozenset[str]:
    """Every flag of every command."""
    from paceline.cli import app

    def below(command: Any) -> list[Any]:
        return [command, *(inner for part in getattr(command, "commands", {}).values() for inner in below(part))]

    found = [parameter for command in below(typer.main.get_command(app)) for parameter in command.params]
    return frozenset(flag for parameter in found for flag in (*parameter.opts, *parameter.secondary_opts))


def commands(group: Any, path: str) -> str:
    """Every command below a group, in the order they were added."""
    told = []
    for name, command in group.commands.items():
        told.append(one_command(command, f"{path} {name}"))
        if hasattr(command, "commands"):
            told.append(commands(command, f"{path} {name}"))
    return "\n".join(told)


def one_command(command: Any, path: str) -> str:
    """What it does, and a table for each panel of its `--help`."""
    panels: dict[str, list[list[str]]] = {}
    for parameter in command.params:
        if not parameter.hidden:
            panels.setdefault(parameter.rich_help_panel or "", []).append(parameter_row(parameter))
    told = [f"### {path}", *(help_part(part) for part in (command.help or "").split("\n\n"))]
    for panel, rows in panels.items():
        told += [f"**{panel}**"] * bool(panel) + [table(["option", "type and default", "meaning"], rows).rstrip()]
    return "\n\n".join(told).rstrip() + "\n"


def help_part(part: str) -> str:
    """A paragraph of a command's help; lines that begin with the program's name are to be typed."""
    typed = all(re.match("paceline |cat ", line) for line in part.splitlines())
    return f"```\n{part}\n```" if typed else " ".join(part.split())


def parameter_row(parameter: Any) -> list[str]:
    """Flags (an argument: its name in capitals), type, default and help."""
    flags = [f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("-")]
    name = ", ".join(flags) or f"`{parameter.metavar or parameter.name.upper()}`"
    kind = KINDS[parameter.type_descriptor.annotation] + (", several times" if parameter.multiple else "")
    default = None if name.startswith("`--no-") else parameter.default  # of what it turns off
    shown = ", required" if parameter.required else "" if default is None or default is False else f", `{default}`"
    return [name, kind + shown, " ".join((parameter.help or "").split()).replace("|", "or")]


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(__doc__)
        return 2
    new = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == new:
        return 0
    if words:
        print("docs/reference.md is out of date")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print("docs/reference.md was rewritten")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
