"""The measurement of starts, its shape: no time is judged here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load


@pytest.fixture
def startup() -> Any:
    return load("bench/startup.py")


def test_a_run_has_its_first_output_its_end_and_its_processor_time(startup: Any, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("print('x', flush=True)")
    side = startup.Side(sys.executable, "import there", checkout=tmp_path)
    side.run(), side.run()
    figures = side.figures()
    assert all(len(figures[name]["runs"]) == 2 for name in startup.FIGURES)
    assert 0 < figures["first"]["least"] <= figures["whole"]["least"]
    # what a kernel says of processor time may be coarse: it is only never less than nothing
    assert all(run >= 0 for name in startup.FIGURES for run in figures[name]["runs"])


def test_a_run_that_fails_is_no_figure(startup: Any) -> None:
    with pytest.raises(SystemExit, match="ended with code 3"):
        startup.Side(sys.executable, "raise SystemExit(3)").run()
