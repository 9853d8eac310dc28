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


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with blocks and chunks so small that few positions make many of them."""
    from paceline.kernels.triton import attention as module

    monkeypatch.setattr(module, "BLOCKS", (16, 16))
    monkeypatch.setattr(module, "CHUNK", 32)
    monkeypatch.setattr(module, "EDGE", 32)  # windows of 20 have small chunks alone, those of 41 both
    monkeypatch.setattr(module, "FAR_CHUNK", 48)
    monkeypatch.setattr(module, "AHEAD", 1)
    return module


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The native library is not needed here."""
