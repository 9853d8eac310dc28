"""Triton kernels on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

THERE = torch.cuda.is_available()  # asked before the GPU is hidden from the other tests
if not THERE:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if THERE else "cpu")


@pytest.fixture
def tables(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of tiles, with nothing measured of ours or of the library."""
    from paceline.kernels.triton import tiles

    for table in (tiles.measured, tiles.library):
        for key in list(table):
            monkeypatch.delitem(table, key)
    yield tiles
    tiles.measured.clear()
    tiles.library.clear()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The native library is not needed here."""
