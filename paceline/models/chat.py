"""Chat templates, rendered with jinja2 as transformers renders them: same sandbox, filters, names and spaces.

Templates come with models, from anywhere: they run in jinja2's immutable sandbox, and see plain data alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message's reasoning is called, the usual first


def render(template: str, messages: list[Any], names: Mapping[str, Any]) -> str:
    """The prompt of one conversation. `names`: what else the template sees (tools, add_generation_prompt, …)."""
    chat = [_with_reasoning(message) for message in plain(messages)]
    return str(compiled(template).render(messages=chat, **plain(dict(names))))


def plain(value: Any) -> Any:
    """A value as JSON has it: what a caller's own objects can do is nothing for a template that came with a model."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value) if type(value) in (list, tuple) else [*map(plain, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's
        return plain(value.model_dump())
    if type(value).__module__ == "numpy" and not getattr(value, "shape", None) and hasattr(value, "item"):
        return plain(value.item())
    return f"<{type(value).__name__}>"


def _with_reasoning(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TypeError(f"a chat message must be a dictionary, not {message!r}")
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, REASONING[0]: said}


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _namespace(),
    }
    return environment


def _generation() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}` marks what a model said, for whoever trains on it; here its body is just text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _namespace() -> Any:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Names(Namespace):
        """No attribute that begins with an underscore: those lead into Python."""

        def __init__(*args: Any, **values: Any) -> None:
            self, given = args[0], dict(*args[1:], **values)
            for name in given:
                _refuse_hidden(name)
            Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_hidden(name)
            super().__setitem__(name, value)

    def _refuse_hidden(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r}: names on a namespace begin with a letter")

    return Names


class _Dict:
    """`dict(…)` and `dict.fromkeys(…)`, and no way from there to the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Not jinja2's own filter, which escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
