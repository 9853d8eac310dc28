"""`paceline chat`: a conversation at the terminal, with the drafter's work in colours and figures.

The model's words go to standard output; everything else that is said goes to standard error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from paceline.cli import options, prompting
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cli.talk import Talk

QUESTION, MORE = "> ", ". "


@options.takes(
    options.TEMPLATE,
    options.SYSTEM,
    options.DRAFTERS,
    options.sampling("n", "logprobs", max_tokens=512),
    options.COLOR,
    options.machine(),
)
def chat(ctx: typer.Context) -> None:
    """Talk with a model: several turns, answers as they come, each token in the colour of the drafter that gave it.

    Without --drafter, suffix drafts. /help inside lists what may change on the
    way: drafter, temperature, template, system message. Lines may be piped in:
    answers go to standard output, all else to standard error.

    paceline chat
    paceline chat --drafter suffix --drafter ngram --temperature 0.7
    """
    from paceline.cli.talk import Talk

    run(Talk(ctx.params))


def run(talk: Talk) -> None:
    """Line by line until the end of input or /quit; nothing that is refused ends it."""
    from paceline.cli import show

    greet(talk)
    while not talk.ended:
        try:
            line = read_message()
            if line is None:
                return
            take(talk, line)
        except KeyboardInterrupt:
            show.note("\n(/quit or Ctrl-D ends the chat)")
        except PacelineError as error:
            show.say(str(error), "red")


def greet(talk: Talk) -> None:
    from paceline.cli import show

    if talk.conversation.template == "none":
        show.note("no chat template: your text is completed as it is; /template vicuna gives it one")
    if not sys.stdin.isatty():
        return
    cost = talk.plain.seconds
    speed = "" if cost is None else f"; plain decoding makes ≈ {1 / cost:.0f} tokens/s here"
    show.note(f"{talk.model}, drafter {talk.drafter_name}{speed}")
    show.say("\n".join(talk.legend()))
    show.note("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends")


def read_message() -> str | None:
    """A backslash at the end of a line carries the message on into the next; None at the end of input."""
    from paceline.cli import show

    line = prompting.read_line(QUESTION)
    while line is not None and line.endswith("\\"):
        more = prompting.read_line(MORE)
        line = line[:-1] + ("" if more is None else "\n" + more)
    if line is not None and not sys.stdin.isatty() and sys.stderr.isatty():
        show.note(QUESTION + line)  # who watches sees what is answered
    return line


def take(talk: Talk, line: str) -> None:
    """A command, or a message; one line that begins with a slash is typed with two. Several lines are no command."""
    from paceline.cli import show, slash

    text = line.strip()
    if text.startswith("/") and "\n" not in text:
        if not text.startswith("//"):
            show.say(slash.obey(talk, text) or "")
            return
        text = text[1:]
    if text:
        talk.answer(text)
