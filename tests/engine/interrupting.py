"""Ctrl-C at a chosen line of the code under test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """Raises at the n-th line, of those that run under it, that `strikes` says it may strike; `follows` says in which
    functions lines are looked at."""

    def __init__(
        self, line: int, follows: Callable[[FrameType], bool], strikes: Callable[[FrameType], bool] = lambda frame: True
    ) -> None:
        self.left, self.fired = line, False
        self._follows, self._strikes = follows, strikes

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *ignored: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if self._follows(frame) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.fired and event == "line" and self._strikes(frame):
            self.left -= 1
            if self.left <= 0:
                self.fired = True
                raise KeyboardInterrupt
        return self._line
