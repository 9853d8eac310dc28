"""Tests of the native kernels run where these were built, and are skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.kernels.cpu.library import library

WHY = "the native kernels are not built here"
needs_native = pytest.mark.skipif(library() is None, reason=WHY)
NATIVE = pytest.param("native", marks=needs_native)  # a value of `kernels`, beside those that are always there
EXACT = ["reference", NATIVE]  # the kernels that promise the same text to the bit


def marked(rows: list[tuple[Any, ...]]) -> list[Any]:
    """Rows of values for `parametrize`, those that end with the native kernels to be skipped without them."""
    return [pytest.param(*row, marks=needs_native if row[-1] == "native" else ()) for row in rows]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """The native kernels on so many threads."""
    found = library()
    assert found is not None
    before = found.paceline_num_threads()
    found.paceline_threads(count)
    try:
        yield
    finally:
        found.paceline_threads(before)
