"""`paceline chat` on a real terminal, and what is pasted there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import typer

from paceline import LLM
from paceline.cli import app
from paceline.cli.chat import take
from paceline.cli.talk import Talk
from tests.cli.chat.talking import FIRST, answers
from tests.cli.terminal import on_terminal


def chat_options(checkpoint: Path) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    ctx = command.commands["chat"].make_context("chat", ["--model", str(checkpoint), "--max-tokens", "4"])
    chosen: dict[str, Any] = ctx.params
    return chosen


def test_on_a_terminal_the_chat_is_coloured_and_leaves_a_clean_screen(llm: LLM, checkpoint: Path) -> None:
    words = ("chat", "--model", str(checkpoint), "--max-tokens", "200", "--drafter", str(checkpoint))
    with on_terminal(*words) as terminal:
        terminal.wait_for("Ctrl-D ends")
        terminal.wait_for("> ")
        terminal.type(FIRST + "\n")
        terminal.wait_for("cut short")
        terminal.wait_for("> ")
        terminal.type("/temperature 0.5\n")
        terminal.wait_for("temperature: 0.5")
        terminal.wait_for("> ")
        terminal.type("\x1b[200~a pasted line\nand another\x1b[201~\n")
        terminal.wait_for("cut short")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.press("\x03", until="/quit or Ctrl-D ends the chat")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        lines, written = terminal.screen.lines, terminal.written.decode()
    answer = answers(llm, FIRST, max_tokens=200)[0]
    start = lines.index(f"> {FIRST}") + 1
    end = next(place for place in range(start, len(lines)) if lines[place].startswith("200 tokens · "))
    said = lines[start:end]
    assert "".join(said).replace(" ", "") == answer.replace(" ", "")
    for line, following in itertools.pairwise(said):  # a line ends where the next word does not fit
        assert len(line) + 1 + len(following.split()[0]) > 80
    assert lines[end + 1 :][:2] == ["> /temperature 0.5", "temperature: 0.5"]
    assert written.count("cut short") == 2, "two lines that are pasted are one question"
    assert "\x1b[1;32mdraft_model\x1b[0m" in written  # the legend
    assert written.count("\x1b[1;32m") > 100  # and the tokens
    assert "per forward" in written.split("cut short")[0]


def test_several_pasted_lines_are_a_message_even_where_the_first_looks_like_a_command(
    llm: LLM, checkpoint: Path, prompts: list[str]
) -> None:
    take(Talk(chat_options(checkpoint)), "/* riders */\nand the wind")
    assert prompts == [llm.read_chat([{"role": "user", "content": "/* riders */\nand the wind"}]).text]
