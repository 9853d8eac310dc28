"""An answer's text cut by origin: which characters came with which token, and how each origin looks in a terminal.

Knows tokens, provenance and text that may lag behind its tokens (half a character, the beginning of a stop string).
Must not know where it is printed: styles are plain strings in rich's language, for whoever has a terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.engine.detokenizer import Detokenizer
from paceline.engine.sequence import Provenance

Piece = tuple[str, Provenance]

# Never colour alone: bold is drafted, underlined is put right, slanted is won on top, upright is plain.
STYLES = {"accepted": "bold green", "corrected": "underline yellow", "bonus": "italic cyan", "plain": "default"}
MEANINGS = {
    "accepted": "drafted and accepted",
    "corrected": "the target's own, where the draft was wrong",
    "bonus": "the target's own, after a draft accepted whole",
    "plain": "no draft",
}
# Accepted tokens by drafter, in the order in which drafters first gave one; further ones begin again.
DRAFTER_STYLES = (STYLES["accepted"], "bold underline magenta", "bold italic blue", "bold reverse green")


# Control codes as they may be shown: by their symbols, and those of the upper half, which have none, by a sign for it.
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def readable(text: str) -> str:
    """Text that moves no cursor but by its line breaks and tabs."""
    return text.translate(VISIBLE)


def pieces(
    ids: Sequence[int],
    provenance: Sequence[Provenance],
    tokenizer: Any,
    prompt: Sequence[int] = (),
    text: str | None = None,
    most: int | None = None,
) -> list[Piece]:
    """An answer, piece by piece; a character that took several tokens belongs to the last of them.

    prompt: the ids before it. text: what was kept of the answer, which may be less than its tokens say. most: only so
    many of its first tokens.
    """
    stream = Pieces(tokenizer, prompt)
    stream.take(ids[:most], provenance)
    if most is not None and most < len(ids):
        return stream.show(None if text is None else text[: stream.ready])
    stream.finish()
    return stream.show(text)


def legend(drafters: Sequence[str], kinds: Iterable[str]) -> list[tuple[str, str, str]]:
    """Name, style and meaning of every drafter that gave tokens and of every other origin among `kinds`."""
    seen = set(kinds)
    rows = [
        (name, style_of(Provenance(name, "accepted", 0, 1), drafters), f"drafted by {name} and accepted")
        for name in (drafters if "accepted" in seen else ())
    ]
    return rows + [(kind, STYLES[kind], MEANINGS[kind]) for kind in MEANINGS if kind in seen and kind != "accepted"]


def style_of(told: Provenance, drafters: Sequence[str] = ()) -> str:
    """The style of a token's text; `drafters` are those seen so far, so that each has its own."""
    if told.drafter in drafters:
        return DRAFTER_STYLES[drafters.index(told.drafter) % len(DRAFTER_STYLES)]
    return STYLES[told.kind]


class Pieces:
    """The same for an answer that is still coming.

    Tokens go in by `take`, and `show` says where the text that may be shown by now came from. The two need not keep
    step: text is held back while it may become a stop string, and what a stop cut off is never asked for.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, list(prompt), (), include_stop=False, skip_special=skip_special)
        self._waiting: deque[Piece] = deque()
        self._last: Provenance | None = None

    def take(self, ids: Sequence[int], provenance: Sequence[Provenance]) -> None:
        for token, told in zip(ids, provenance):
            self._detokenizer.push(token)
            self._last = told
            self._queue()

    def finish(self) -> None:
        """No more tokens: what is left of a half character is the last token's."""
        self._detokenizer.finish()
        self._queue()

    def _queue(self) -> None:
        text = self._detokenizer.take()
        if text and self._last is not None:
            self._waiting.append((text, self._last))

    @property
    def ready(self) -> int:
        """How many characters `show` could show by now."""
        return sum(len(piece) for piece, _ in self._waiting)

    def show(self, text: str | None) -> list[Piece]:
        """The next piece or pieces, as many as make up `text`; None: all there are."""
        if text is None:
            text = "".join(piece for piece, _ in self._waiting)
        shown: list[Piece] = []
        while text and self._waiting:
            piece, told = self._waiting.popleft()
            if len(piece) > len(text):
                self._waiting.appendleft((piece[len(text) :], told))
            shown.append((text[: len(piece)], told))
            text = text[len(piece) :]
        if text and self._last is not None:
            shown.append((text, self._last))
        return shown
