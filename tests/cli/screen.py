"""A terminal's screen, as far as paceline writes to one: enough to see where every character ends up."""

from __future__ import annotations

import re

from rich.cells import cell_len

TOKENS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[78D]|.", re.DOTALL)


class Screen:
    """`feed` it what a program writes; `text` is all that was ever on it, scrolled off or not."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.cells: list[list[str]] = [[" "] * width for _ in range(height)]
        self.top = 0  # scrolled off above it
        self.row = self.column = 0
        self.saved = (0, 0)

    def feed(self, written: str) -> None:
        for token in TOKENS.findall(written):
            if token.startswith("\x1b"):
                self._obey(token)
            elif token == "\n":
                self._down()
                self.column = 0
            elif token == "\r":
                self.column = 0
            elif token == "\t":
                self.column = min((self.column // 8 + 1) * 8, self.width - 1)
            elif token >= " ":
                self._write(token)

    def _write(self, character: str) -> None:
        cells = cell_len(character)
        if self.column + cells > self.width:  # the wrap that was waiting, or one that a wide character needs
            self._down()
            self.column = 0
        line = self.cells[self.top + self.row]
        for place in range(cells):
            line[self.column + place] = character if place == 0 else ""
        self.column += cells

    def _down(self) -> None:
        if self.row == self.height - 1:
            self.top += 1
            self.cells.append([" "] * self.width)
        else:
            self.row += 1

    def _obey(self, code: str) -> None:
        here = min(self.column, self.width - 1)  # moving forgets a wrap that was waiting
        if code == "\x1bD":
            self._down()
            self.column = here
        elif code == "\x1b7":
            self.saved = (self.row, here)
        elif code == "\x1b8":
            self.row, self.column = self.saved
        elif code.endswith("A"):
            self.row, self.column = max(0, self.row - 1), here
        elif code.endswith("B"):
            self.row, self.column = min(self.height - 1, self.row + 1), here
        elif code.endswith("J"):
            for place in range(self.top + self.row, len(self.cells)):
                start = here if place == self.top + self.row else 0
                self.cells[place][start:] = [" "] * (self.width - start)

    @property
    def lines(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip("\n")
