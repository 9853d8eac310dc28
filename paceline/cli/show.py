"""Text on a terminal as it comes, every token in the style of its origin, with a line of figures below it.

Knows escape codes and columns. Must not know what the figures mean, nor where pieces come from (`paceline.pieces`).
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from paceline import pieces
from paceline.pieces import Piece

DIM = "dim"
PARTS = re.compile(r"[ \n\t]|[^ \n\t]+")
ERASE_BELOW = "\x1b[J"
MAKE_ROOM = "\x1bD\x1b[A"  # one line down, which scrolls at the bottom, and back up: the column stays
SAVE, RESTORE, NEXT_LINE = "\x1b7", "\x1b8", "\x1b[B\r"


class Painter:
    """One stream, coloured or not. `drafters` grows as new ones give tokens, so that each keeps its style."""

    def __init__(self, stream: TextIO, coloured: bool | None = None) -> None:
        self.stream = stream
        console = Console(file=stream)
        self.coloured = console.color_system is not None if coloured is None else coloured
        self._colours = coloured is True or not console.no_color
        self._is_terminal = stream.isatty()
        self._has_line = console.is_terminal and not console.is_dumb_terminal and self._is_terminal
        self.drafters: list[str] = []
        self._column = 0
        self._word: list[Piece] = []  # of which more may come: it is not cut at the edge, so it waits
        self._shown = False  # a line of figures stands below

    def styled(self, text: str, style: str) -> str:
        """Text in a style, line by line, so that no underline runs to the terminal's edge."""
        if not self.coloured or style == pieces.STYLES["plain"]:
            return text
        look = Style.parse(style)
        look = look if self._colours else look.without_color
        return "\n".join(look.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))

    def paint(self, shown: Iterable[Piece]) -> str:
        """Pieces as they go to the stream."""
        out = []
        for text, told in shown:
            if told.drafter is not None and told.drafter not in self.drafters:
                self.drafters.append(told.drafter)
            out.append(self.styled(self._readable(text), pieces.style_of(told, self.drafters)))
        return "".join(out)

    def write(self, shown: Sequence[Piece], below: str | None = None) -> None:
        """The next pieces, on a terminal word by word; `below` stands under them until more is written."""
        if not self._is_terminal:
            self.put(self.paint(shown))
            return
        width = shutil.get_terminal_size().columns
        folded = list(self._fold(shown, width))
        parts = [ERASE_BELOW if self._shown else "", self.paint(folded)]
        # In the last column the cursor may wait to wrap, which moving it away and back would forget, or stand on text.
        self._shown = self._has_line and below is not None and self._column < width - 1
        if self._shown and below is not None:
            line = self.styled(below[: width - 1], DIM)
            parts += [MAKE_ROOM, SAVE, NEXT_LINE, line, RESTORE]
        self.put("".join(parts))

    def end(self) -> None:
        """The text is complete: no line below, and the cursor at the beginning of the next."""
        last = list(self._settle(shutil.get_terminal_size().columns))
        self.put((ERASE_BELOW if self._shown else "") + self.paint(last) + "\n")
        self._shown, self._column = False, 0

    def _fold(self, shown: Iterable[Piece], width: int) -> Iterator[Piece]:
        """The same pieces with line breaks between words where a line is full."""
        for text, told in shown:
            for part in PARTS.findall(self._readable(text)):
                if part not in " \n\t":
                    self._word.append((part, told))
                    if sum(cell_len(piece) for piece, _ in self._word) > width or cell_len(part) > len(part):
                        yield from self._settle(width)  # no line holds it, or it may be cut anywhere
                    continue
                yield from self._settle(width)
                if part != " " or self._column < width:  # a space at the edge is the line's end
                    self._column = column_after(part, self._column, width)
                    yield part, told

    def _settle(self, width: int) -> Iterator[Piece]:
        """The word that waited, on a line that holds it."""
        word, self._word = self._word, []
        length = sum(cell_len(piece) for piece, _ in word)
        if word and self._column and length <= width < self._column + length:
            self._column = 0
            yield "\n", word[0][1]
        for piece, told in word:
            self._column = column_after(piece, self._column, width)
            yield piece, told

    def put(self, text: str) -> None:
        """Characters the stream has no bytes for become question marks rather than an error."""
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
        self.stream.flush()

    def _readable(self, text: str) -> str:
        """On a terminal no model steers the cursor."""
        return pieces.readable(text) if self._is_terminal else text

    def legend(self, kinds: Iterable[str], only: Sequence[str] | None = None) -> list[str]:
        """A line for each drafter (in `only`) and each other origin among `kinds`, its name in its style."""
        hidden = {*self.drafters} - {*(self.drafters if only is None else only)}
        rows = [row for row in pieces.legend(self.drafters, kinds) if row[0] not in hidden]
        widest = max((len(name) for name, _, _ in rows), default=0)
        return [
            f"  {self.styled(name, style)}{' ' * (widest - len(name))}  {self.styled(meaning, DIM)}"
            for name, style, meaning in rows
        ]


def column_after(text: str, column: int, width: int) -> int:
    """Where the cursor is after `text`, from 0 to `width`, which is the last column with a wrap to come."""
    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min((column // 8 + 1) * 8, width - 1)
        else:
            cells = cell_len(character)
            column = cells if column + cells > width else column + cells
    return column


def say(text: str, style: str = pieces.STYLES["plain"]) -> None:
    """A line on standard error, beside the answer; nothing is no line."""
    if text:
        painter = Painter(sys.stderr)
        painter.put(painter.styled(text, style) + "\n")


def note(text: str) -> None:
    say(text, DIM)
