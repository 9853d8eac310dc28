"""What reaches a terminal: styles, the line of figures below the text, and nothing that moves a cursor by itself."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.show import Painter, column_after
from paceline.engine.sequence import Provenance
from tests.cli.screen import Screen

DRAFTED, OWN = Provenance("ngram", "accepted", 0, 1), Provenance(None, "plain", 0, 2)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("LINES", "4")


LETTERS = st.text(alphabet="ab \n\t漢é", max_size=9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LETTERS, st.booleans(), st.sampled_from([None, "figures", "a longer line of figures"]))))
def test_the_line_below_leaves_no_trace_in_the_text(parts: list[tuple[str, bool, str | None]]) -> None:
    """At the edge, at the bottom, over wide characters: once gone, the screen is as if it had never been there."""
    stream = Terminal()
    painter = Painter(stream)
    bare = Terminal()
    other = Painter(bare)
    for text, drafted, below in parts:
        painter.write([(text, DRAFTED if drafted else OWN)], below)
        other.write([(text, DRAFTED if drafted else OWN)])
    painter.end()
    other.end()
    with_line, without = Screen(12, 4), Screen(12, 4)
    with_line.feed(stream.getvalue())
    without.feed(bare.getvalue())
    assert with_line.text == without.text
    assert with_line.column == without.column == 0


WORDS = st.text(alphabet="abc.", min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(WORDS, min_size=1)), st.integers(1, 7))
def test_lines_end_between_words_however_the_text_comes(lines: list[list[str]], step: int) -> None:
    text = "\n".join(" ".join(words) for words in lines)
    stream, screen = Terminal(), Screen(12, 400)
    painter = Painter(stream, False)
    for place in range(0, len(text), step):
        painter.write([(text[place : place + step], OWN)])
    painter.end()
    screen.feed(stream.getvalue())
    wrapped = [line for words in lines for line in textwrap.wrap(" ".join(words), 12)]
    assert screen.text.splitlines() == wrapped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a {'b' * 30} c", [f"a {'b' * 10}", "b" * 12, "b" * 8 + " c"]),
        ("a " + "漢" * 7, ["a 漢漢漢漢漢", "漢漢"]),
    ],
)
def test_what_no_line_holds_and_what_may_be_cut_anywhere_runs_to_the_edge(text: str, shown: list[str]) -> None:
    stream, screen = Terminal(), Screen(12, 8)
    painter = Painter(stream, False)
    for letter in text:
        painter.write([(letter, OWN)])
    painter.end()
    screen.feed(stream.getvalue())
    assert screen.text.splitlines() == shown


def test_the_line_stands_below_the_text_while_it_comes() -> None:
    stream, screen = Terminal(), Screen(12, 4)
    painter = Painter(stream)
    painter.write([("one two\nthr ee", OWN)], "3 tokens and more")
    screen.feed(stream.getvalue())
    assert screen.lines[:3] == ["one two", "thr", "3 tokens an"]  # of the last word more may come
    assert (screen.row, screen.column) == (1, 4)


def test_a_stream_that_is_no_terminal_gets_the_text_and_nothing_else() -> None:
    stream = io.StringIO()
    painter = Painter(stream)
    painter.write([("a\x1b[2J", DRAFTED), ("b\n", OWN)], "figures")
    painter.end()
    assert stream.getvalue() == "a\x1b[2Jb\n\n"
    assert painter.legend(["accepted", "plain"]) == [
        "  ngram  drafted by ngram and accepted",
        "  plain  no draft",
    ]


def test_styles_are_forced_or_forbidden_whatever_the_stream() -> None:
    forced, forbidden = io.StringIO(), Terminal()
    Painter(forced, True).write([("a\nb", DRAFTED), ("c", OWN)])
    assert forced.getvalue() == "\x1b[1;32ma\x1b[0m\n\x1b[1;32mb\x1b[0mc"
    Painter(forbidden, False).write([("a\nb", DRAFTED), ("c ", OWN)])
    assert forbidden.getvalue() == "a\nbc "


def test_without_colours_the_other_differences_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    painter = Painter(stream)
    painter.write([("a", DRAFTED), ("c", Provenance(None, "corrected", 0, 1))])
    painter.end()
    assert stream.getvalue() == "\x1b[1ma\x1b[0m\x1b[4mc\x1b[0m\n"


def test_a_model_cannot_steer_the_terminal() -> None:
    stream = Terminal()
    Painter(stream, False).write([("a\x1b[2J\x07\r\tb\n", OWN)])
    assert stream.getvalue() == "a␛[2J␇␍\tb\n"


def test_nor_by_the_control_codes_of_the_upper_half() -> None:
    stream, codes = Terminal(), "".join(map(chr, range(0x80, 0xA0)))
    Painter(stream, False).write([(f"a{codes}é ", OWN)])
    assert stream.getvalue() == "a" + "\ufffd" * 32 + "é "


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Painter(stream).write([("a ", DRAFTED)], "figures")
    assert stream.getvalue() == "a "


def test_characters_the_stream_cannot_write_become_question_marks() -> None:
    raw = io.BytesIO()
    stream: Any = io.TextIOWrapper(raw, encoding="latin-1")
    Painter(stream).put("é ≈ 😀")
    assert raw.getvalue() == "é ? ?".encode("latin-1")


@pytest.mark.parametrize(
    ("text", "column"),
    [("abc", 3), ("a" * 12, 12), ("a" * 13, 1), ("a\nbc", 2), ("\t", 8), ("a" * 9 + "\t", 11), ("a" * 11 + "漢", 2)],
)
def test_the_column_is_where_a_terminal_s_cursor_is(text: str, column: int) -> None:
    assert column_after(text, 0, 12) == column
