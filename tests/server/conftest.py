"""One tiny checkpoint, and one healthy server on it for every test that does it no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import NGram
from tests.cli.checkpoints import write_checkpoint
from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def served(checkpoint: Path) -> Iterator[Served]:
    """It drafts; requests that must not say so."""
    with serving(checkpoint, NGram(min_match=1), max_num_seqs=8) as server:
        yield server
