"""What the tests of models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good tiny checkpoint, to be spoilt."""
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
