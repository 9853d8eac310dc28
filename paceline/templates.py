"""How a conversation becomes a prompt: the tokenizer's own template, one of ours, a string or a Jinja file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import OptionError, first_line

Message = dict[str, Any]

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
    """`own` is True when the text already carries the special tokens a prompt begins with."""

    def __init__(self, given: str | None, tokenizer: Any) -> None:
        self.given, self._tokenizer = given, tokenizer
        self.own = False
        self._jinja: str | None = None
        self._format: str | None = None
        if given is not None and not isinstance(given, str):
            raise OptionError(f"prompt_template={given!r} is not allowed; allowed: a string")
        if given is None:
            self.own = True
        elif given in NAMED:
            self._jinja = NAMED[given]
        elif PLACE in given:
            self._format = given
        elif is_file(given):
            self._jinja, self.own = _read(Path(given)), True
        else:
            raise OptionError(
                f"prompt_template={given!r} is not known; allowed: {', '.join(NAMED)}, a string with {PLACE}, or the "
                "path of a Jinja file"
            )

    def render(self, messages: list[Message]) -> str:
        for message in messages:
            if not isinstance(message, dict) or "role" not in message or "content" not in message:
                raise OptionError(f"a chat message needs 'role' and 'content', but {message!r} was given")
        if not messages:
            raise OptionError("the conversation is empty; it needs at least one message")
        if self._format is not None:
            if len(messages) != 1:
                raise OptionError(f"a template string takes one message, but the conversation has {len(messages)}")
            return self._format.replace(PLACE, str(messages[0]["content"]))
        if self._jinja is None and self._own_template() is None:
            raise OptionError(
                "this model has no chat template; give prompt_template= (llama, vicuna, a string or a file)"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, chat_template=self._jinja, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise OptionError(f"the chat template refused the conversation: {first_line(error)}") from None
        return text

    def _own_template(self) -> str | None:
        return getattr(self._tokenizer, "chat_template", None)


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
