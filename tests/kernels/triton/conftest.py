"""Triton kernels on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.triton.reading import Launch, Reader, launch_of

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
    for name in ("SINGLE", "SINGLE_OWN"):  # chunks are shared wherever they may be
        monkeypatch.setattr(module, name, 0)
    return module


@pytest.fixture(scope="session")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def compilers_take_it(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever kernels a test runs under the interpreter, a compiler understands."""
    if THERE or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    seen, run = set[Launch](), interpreter.GridExecutor.__call__

    def noting(executor: Any, *args: Any, **given: Any) -> None:
        seen.add(launch_of(executor.fn, args, given))
        run(executor, *args, **given)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noting)
    yield
    assert reader.mistakes(seen) == []


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """In place of the folder's above: the native library is not needed here."""
