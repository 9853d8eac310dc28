"""What several commands do with text: find the prompt, decide on the chat template, turn a text into a prompt."""

from __future__ import annotations

import contextlib
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.prompts import Prompt

PATIENCE = 2.0  # seconds before it is said what is waited for
QUESTION = "Your prompt, one line, then Enter: "


def has_template(llm: LLM) -> bool:
    return llm.options.prompt_template is not None or bool(getattr(llm.tokenizer, "chat_template", None))


def check(chat: bool | None, template: str | None, system: str | None = None) -> None:
    """Refuse what --raw makes meaningless."""
    if chat is False and template is not None:
        raise OptionError("--raw and --template contradict each other; give one")
    if chat is False and system is not None:
        why = "a system message has its place in the chat template, which --raw leaves out"
        raise OptionError(f"--raw and --system contradict each other: {why}; give one")


def to_prompt(llm: LLM, text: str, chat: bool | None, system: str | None = None) -> Prompt:
    """A text as one user message in the chat template, or as it is; None: the template if the model has one."""
    from paceline.prompts import read_prompts

    if has_template(llm) if chat is None else chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        return llm.read_chat([*first, {"role": "user", "content": text}])
    if system is not None:
        raise OptionError("--system needs a chat template; leave it out, or add --template vicuna")
    (prompt,) = read_prompts(text, llm.tokenizer, None)
    return prompt


def read_text(prompt: str | None, file: Path | None) -> str:
    """The prompt: the argument, and below it what is piped in; or a file's; on a terminal it is asked for."""
    if prompt is not None and file is not None:
        raise OptionError("a prompt and --file were both given; give one")
    if file is not None:
        return _read_file(file)
    said = None if prompt in (None, "-") else _as_text(str(prompt).encode(errors="surrogateescape"), "the prompt")
    if sys.stdin.isatty():
        return ask() if said is None else said
    piped = read_piped()
    return f"{said}\n{piped}" if said and piped.strip() else said or piped


def read_piped() -> str:
    """All of standard input. Who is waited for in vain is told so: a remote shell keeps it open."""
    with contextlib.suppress(OSError, ValueError):  # what has no descriptor, or cannot be waited for
        if not select.select([sys.stdin], [], [], PATIENCE)[0]:
            sys.stderr.write("reading standard input to its end; < /dev/null says there is none\n")
    return _as_text(sys.stdin.buffer.read(), "the prompt on standard input")


def ask() -> str:
    """One line from the terminal. The question goes where the answer does not."""
    text = read_line(QUESTION)
    if text is None or not text.strip():
        raise OptionError('no prompt was given; type paceline generate "your prompt", or add --file NAME')
    return text


def read_line(question: str) -> str | None:
    """A line without its end, with the terminal's own editing and history where it has them; None at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # input() then has arrow keys and history

            readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted are one
        try:
            return _as_text(input(question).encode(errors="surrogateescape"), "what was typed")
        except EOFError:
            sys.stdout.write("\n")
            return None
    if sys.stdin.isatty():
        sys.stderr.write(question)
        sys.stderr.flush()
    line = sys.stdin.buffer.readline()
    return _as_text(line, "a line of standard input").rstrip("\r\n") if line else None


def _read_file(file: Path) -> str:
    try:
        return _as_text(file.read_bytes(), f"the prompt file {file}")
    except OSError as error:
        raise OptionError(f"the prompt file {file} cannot be read: {error.strerror}") from None


def _as_text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise OptionError(f"{what} cannot be read: it is not UTF-8 text") from None
