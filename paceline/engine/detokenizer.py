"""Tokens to text, as they come: whole characters only, and nothing that may yet become part of a stop string."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character
MAX_HELD = 256  # tokens without a whole character; beyond it the bytes are no text and are shown as they are
CONTEXT, WINDOW = 6, 24  # ids kept because a token's text can depend on those before, and how many before a cut to that


class Detokenizer:
    """One sequence's text. `push` takes a token and says whether a stop string has just been completed."""

    def __init__(
        self, tokenizer: Any, prompt: list[int], stops: tuple[str, ...], *, include_stop: bool, skip_special: bool
    ) -> None:
        self.stops, self.silent = stops, tokenizer is None  # there is no text
        self._include_stop = include_stop
        self._decode, self._piece = _decoder(tokenizer, skip_special)
        self._prompt = list(prompt[-CONTEXT:])
        self._taken = 0
        self._longest = max((len(stop) for stop in stops), default=0)
        self.restart(())

    def restart(self, tokens: Sequence[int]) -> None:
        """As if these tokens had been pushed and nothing else."""
        self._ids = list(self._prompt)
        self._read = len(self._ids)  # ids before it are in the text
        text = self._decode(self._ids)
        self._before = text.rstrip(INCOMPLETE)  # and are this much of it
        self._broken = len(text) - len(self._before)  # what the prompt ends with: the output may complete it
        self._shown = 0  # characters of the ids from `_read` on that are in the text already
        self._finished = False
        self.text = ""
        for token in tokens:
            self.push(token, check_stops=False)

    def push(self, token: int, check_stops: bool = True) -> str | None:
        """Take one token; returns the stop string it completed, if any, with the text already cut."""
        if self.silent:
            return None
        old, piece = len(self.text), self._piece(token)
        if piece is None or self._read < len(self._ids) or self._broken:
            self._ids.append(token)
            piece = self._next_text()
        elif self._ids:
            self._ids, self._before, self._read = [], "", 0  # nothing that comes depends on what was before
        self.text += piece
        return self._find_stop(old) if check_stops and self.stops else None

    def finish(self) -> None:
        """No more tokens: an unfinished character is shown as it is."""
        if not self.silent and not self._finished and self._read < len(self._ids):
            self.text += self._own(self._window())[self._shown :]
            self._read = len(self._ids)
        self._finished = True

    def certain(self, told: int) -> str:
        """Text that is certain, behind the `told` characters that were told before."""
        held = 0 if self._finished or self._include_stop or not self._longest else self._longest - 1
        return self.text[told : max(told, len(self.text) - held)] if held else self.text[told:]

    def take(self) -> str:
        """The same, for whoever does not count: all that was not taken before."""
        delta = self.certain(self._taken)
        self._taken += len(delta)
        return delta

    def _window(self) -> str:
        """The text of the ids not read yet, in the light of those before."""
        return self._decode(self._ids)[len(self._before) :]

    def _own(self, window: str) -> str:
        """A window without what the prompt left broken and nothing completed."""
        if not self._broken:
            return window
        return window[min(self._broken, len(window) - len(window.lstrip(INCOMPLETE))) :]

    def _next_text(self) -> str:
        """What is new and certain: everything but a character that may still be completed."""
        window = self._window()
        if window.endswith(INCOMPLETE) and len(self._ids) - self._read < MAX_HELD:
            certain = self._own(window.rstrip(INCOMPLETE))
            delta, self._shown = certain[self._shown :], max(self._shown, len(certain))
            return delta
        delta, self._shown = self._own(window)[self._shown :], 0
        self._before, self._broken = self._before + window, 0
        if len(self._ids) > WINDOW:
            self._ids = self._ids[-CONTEXT:]
            self._before = self._decode(self._ids)
        self._read = len(self._ids)
        return delta

    def _find_stop(self, old: int) -> str | None:
        """The stop string completed behind the first `old` characters; the text is cut at it."""
        # Only what ends in the new text counts: a stop completed while min_tokens held has passed.
        starts = [max(0, old - len(stop) + 1) for stop in self.stops]
        found = [(self.text.find(stop, starts[order]), order, stop) for order, stop in enumerate(self.stops)]
        found = [item for item in found if item[0] >= 0]
        if not found:
            return None
        # The stop that was completed first ends the text; of those, the one that begins first.
        place, _, stop = min(found, key=lambda item: (item[0] + len(item[2]), item[0], item[1]))
        self.text = self.text[: place + len(stop)] if self._include_stop else self.text[:place]
        self._read = len(self._ids)
        self._finished = True
        return stop


def _decoder(tokenizer: Any, skip_special: bool) -> tuple[Callable[[list[int]], str], Callable[[int], str | None]]:
    """Ids to text, and a token's own (`_pieces`). Straight to the tokenizers library where transformers adds nothing
    but its own cost per call."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None:
        return lambda ids: "", _unknown
    if fast is None or tokenizer.clean_up_tokenization_spaces:
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special)), _unknown
    return lambda ids: str(fast.decode(ids, skip_special_tokens=skip_special)), _pieces(fast, skip_special)


@functools.lru_cache(maxsize=4)
def _pieces(fast: Any, skip_special: bool) -> Callable[[int], str | None]:
    """A token's text where it is the same in any company, found once for all sequences: tokens are bytes, and these
    are whole characters. None: it depends on others."""
    if type(fast.decoder).__name__ != "ByteLevel":
        return _unknown

    @functools.cache
    def piece(token: int) -> str | None:
        text = str(fast.decode([token], skip_special_tokens=skip_special))
        return None if INCOMPLETE in text else text

    return piece


def _unknown(token: int) -> None:
    """What a token's text is follows from those before."""
