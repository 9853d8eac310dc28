"""Tensors that are made once and kept for later: a cache may drop them, a captured round must not lose them.

Who keeps such tensors answers with `hold(…)`; who captures a round holds on to all that was asked for meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Kept = TypeVar("Kept")
_held: list[Any] | None = None


def hold(value: Kept) -> Kept:
    """The same; and whoever captures a round now holds it as long as the round."""
    if _held is not None:
        _held.append(value)
    return value


@contextmanager
def holding() -> Iterator[list[Any]]:
    """All that is asked for inside."""
    global _held
    before, _held = _held, []
    try:
        yield _held
    finally:
        _held = before
