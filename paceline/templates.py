"""How a conversation becomes a prompt: the tokenizer's own template, one of ours, a string, Jinja or a file of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import OptionError, first_line
from paceline.params import check_text

Message = dict[str, Any]
Tools = Sequence[dict[str, Any] | Callable[..., Any]]  # descriptions, or functions that transformers describes

# Written as Jinja, so that conversations of several turns work.
NAMED = {
    "llama": (
        "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
        "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{% if messages[0].role != 'system' %}A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. {% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} "
        "{% elif m.role == 'user' %}USER: {{ m.content }} "
        "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}ASSISTANT:"
    ),
}
PLACE = "{input_text}"


class PromptTemplate:
    """`own` is True when the text already carries the special tokens a prompt begins with. called: in refusals."""

    def __init__(self, given: str | None, tokenizer: Any, called: str = "prompt_template") -> None:
        self.given, self._tokenizer = given, tokenizer
        self.own = False
        self._jinja: str | None = None
        self._format: str | None = None
        if given is not None and not isinstance(given, str):
            raise OptionError(f"{called}={given!r} is not allowed; allowed: a string")
        if given is None:
            self.own = True
        elif given in NAMED:
            self._jinja = NAMED[given]
        elif PLACE in given:
            self._format = given
        elif "{%" in given or "{{" in given:
            self._jinja, self.own = given, True
        elif is_file(given):
            self._jinja, self.own = _read(Path(given)), True
        else:
            raise OptionError(
                f"{called}={given!r} is not known; allowed: {', '.join(NAMED)}, a string with {PLACE}, Jinja, or the "
                "path of a Jinja file"
            )

    def render(self, messages: list[Message], tools: Tools | None = None, **how: Any) -> str:
        """how: what the tokenizer's apply_chat_template takes beside the messages."""
        messages = [_read_message(message) for message in messages]
        if not messages:
            raise OptionError("the conversation is empty; it needs at least one message")
        if tools:
            self._check_tools(tools)
        _check_said(messages)
        if self._format is not None:
            if len(messages) != 1:
                raise OptionError(f"a template string takes one message, but the conversation has {len(messages)}")
            return self._format.replace(PLACE, messages[0]["content"])
        if self._jinja is None and self._own_template() is None:
            raise OptionError(
                "this model has no chat template; give prompt_template= (llama, vicuna, a string or a file)"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                **{"add_generation_prompt": True, **how, "chat_template": self._jinja, "tokenize": False},
            )
        except Exception as error:
            raise OptionError(f"the chat template refused the conversation: {first_line(error)}") from None
        return text

    def _check_tools(self, tools: Any) -> None:
        """A template that never speaks of tools would drop them."""
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) or callable(tool) for tool in tools):
            raise OptionError(f"tools={tools!r:.80} is not allowed; allowed: a list of dictionaries or functions")
        template = self._format or self._jinja or self._own_template()
        if isinstance(template, str) and "tools" not in template:
            raise OptionError("tools were given, but the chat template has no place for them; leave them out")

    def _own_template(self) -> str | None:
        return getattr(self._tokenizer, "chat_template", None)


def _read_message(message: Any) -> Message:
    """A message as templates take it: its content one text; arguments of calls, which OpenAI writes as JSON, as
    objects. A message that only calls tools may have no content."""
    if not isinstance(message, dict) or "role" not in message or not ({"content", "tool_calls"} & message.keys()):
        raise OptionError(f"a chat message needs 'role' and 'content', but {message!r} was given")
    calls, content = message.get("tool_calls"), message.get("content")
    read = {**message, "content": "" if calls and content is None else _read_content(content)}
    return {**read, "tool_calls": [_read_call(call) for call in calls]} if isinstance(calls, list) else read


def _read_content(content: Any) -> str:
    """A text, or a list of text parts, which stand below each other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise OptionError(f"a message's content must be a text or a list of text parts, not {content!r:.60}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            said = f"type {kind!r}" if kind is not None and kind != "text" else f"{part!r:.60}"
            raise OptionError(f'a content part of {said} is not allowed; allowed: {{"type": "text", "text": "…"}}')
        texts.append(part["text"])
    return "\n".join(texts)


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):  # no JSON, or none that Python reads
        return call


def _check_said(messages: list[Message]) -> None:
    """What a prompt of text alone would be refused for: nothing in it, or what is no character."""
    for place, message in enumerate(messages, 1):
        text = message["content"] if isinstance(message["content"], str) else "…"
        check_text("a message", text)
        if place == len(messages) and message["role"] == "user" and not text.strip():
            raise OptionError("the prompt is empty; a message needs at least one character that is no space")


def is_file(name: str) -> bool:
    """Whether a template's name is the path of a file."""
    try:
        return Path(name).is_file()
    except OSError:  # too long for a path
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise OptionError(f"the template file {path} cannot be read: it is not UTF-8 text") from None
    except OSError as error:
        raise OptionError(f"the template file {path} cannot be read: {error.strerror or error}") from None
