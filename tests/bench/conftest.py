"""Scripts that several files test."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.bench.scripts import ROOT, load


@pytest.fixture(scope="session")
def gpu() -> Any:
    """bench/gpu.py; its neighbours are modules like any other from then on."""
    sys.path.insert(0, str(ROOT / "bench"))  # where it finds them
    try:
        return load("bench/gpu.py")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="session")
def figures() -> ModuleType:
    return load("docs/figures.py")
