"""Triton kernels on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

THERE = torch.cuda.is_available()  # asked before the GPU is hidden from the other tests
if not THERE:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if THERE else "cpu")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The native library is not needed here."""
