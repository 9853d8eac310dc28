"""What a newcomer reads to follow a token: every function the project enters while a running engine answers a request.

    python docs/way.py              print them, file by file, in the order they are first entered

Counted are the lines, blank ones apart, of each function that is entered, however little of it is run, and of the
classes those belong to or make: their fields and docstrings. The request is greedy, with n-gram drafts, on a CPU; the
engine has answered before, so what is made once and kept is not made again and not counted: a model's recording (its
`describe` and `run_layer` are added, for they are what runs), where cache layers lie, empty proposals, places of a
shape met before.
The C++ behind the kernels is not counted, nor what is read when a model is loaded.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paceline

PACKAGE = Path(paceline.__file__).resolve().parent


@dataclass
class Way:
    entered: dict[CodeType, None] = field(default_factory=dict)  # in order
    made: dict[type, None] = field(default_factory=dict)  # whose constructors nobody wrote

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(str(PACKAGE)):
            self.entered.setdefault(code)
        elif code.co_name in ("__init__", "__new__", "<lambda>"):
            first = next(iter(frame.f_locals.values()), None)
            kind = first if isinstance(first, type) else type(first)
            written = inspect.isfunction(kind.__dict__.get("__init__")) and code.co_filename != "<string>"
            if kind.__module__.startswith("paceline.") and not written:
                self.made.setdefault(kind)

    def lines(self) -> dict[str, dict[str, set[int]]]:
        """By file, by function or class, in order: the numbers of its lines that are not blank."""
        found: dict[str, dict[str, set[int]]] = {}
        for code in self.entered:
            own = _definitions(code.co_filename)
            name = next((n for n, node in own.items() if _start(node) == code.co_firstlineno), None)
            if name is None:
                continue  # a lambda or comprehension inside a function that was entered
            self._put(found, code.co_filename, name)
            if "." in name and name.rpartition(".")[0] in own:
                self._put(found, code.co_filename, name.rpartition(".")[0])
        for kind in self.made:
            self._put(found, inspect.getfile(kind), kind.__qualname__)
        return found

    def add(self, function: Callable[..., Any]) -> None:
        self.entered.setdefault(function.__code__)

    @staticmethod
    def _put(found: dict[str, dict[str, set[int]]], file: str, name: str) -> None:
        node = _definitions(file).get(name)
        if node is None:
            return
        numbers = set(range(_start(node), (node.end_lineno or 0) + 1))
        if isinstance(node, ast.ClassDef):  # its methods count when they are entered
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    numbers -= set(range(_start(part), (part.end_lineno or 0) + 1))
        text = Path(file).read_text(encoding="utf-8").splitlines()
        own = found.setdefault(str(Path(file).relative_to(PACKAGE.parent)), {})
        own[name] = {number for number in numbers if text[number - 1].strip()}


def _start(node: Any) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


_read: dict[str, dict[str, Any]] = {}


def _definitions(file: str) -> dict[str, Any]:
    """Functions and classes of a file, by qualified name."""
    if file not in _read:
        found: dict[str, Any] = {}

        def look(body: list[ast.stmt], prefix: str) -> None:
            for node in body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found[prefix + node.name] = node
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{prefix}{node.name}.")

        look(ast.parse(Path(file).read_text(encoding="utf-8")).body, "")
        _read[file] = found
    return _read[file]


def follow(llm: Any, prompt: Any, params: Any) -> Way:
    """The way of a request's tokens through an LLM that has answered another."""
    llm.generate("Hello", params)
    way = Way()
    sys.setprofile(way.note)
    try:
        llm.generate(prompt, params)
    finally:
        sys.setprofile(None)
    way.add(type(llm.model).describe)
    way.add(type(llm.model).run_layer)
    return way


def count(way: Way) -> int:
    return sum(len(numbers) for parts in way.lines().values() for numbers in parts.values())


def main() -> None:
    from paceline import LLM, SamplingParams

    llm = LLM(drafter="ngram")
    way = follow(llm, "one two three four one two three four one two", SamplingParams(temperature=0, max_tokens=40))
    lines = way.lines()
    for file, parts in lines.items():
        print(f"{sum(map(len, parts.values())):5} {file}")
        for name, numbers in parts.items():
            print(f"          {len(numbers):4} {name}")
    print(f"{count(way)} lines of {sum(map(len, lines.values()))} functions and classes in {len(lines)} files")


if __name__ == "__main__":
    main()
