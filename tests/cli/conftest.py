"""One tiny checkpoint for all tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import figures
from tests.cli.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "raw", template=None)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of plain decoding takes its tokens, however slow the machine."""
    monkeypatch.setattr(figures, "PROBE_SECONDS", float("inf"))
