"""bench/host_overhead.py, run small, as anybody would run it. No time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "host_overhead.py"


@pytest.mark.parametrize("how", [[], ["--captured"], ["--captured", "--waiting"]])
def test_it_measures_every_case_at_every_size_and_writes_it_down(tmp_path: Path, how: list[str]) -> None:
    words = ["--steps", "3", "--sequences", "1", "2", "--output", str(tmp_path / "host.json"), *how]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert {row["sequences"] for row in rows} == {1, 2}
    assert len({(row["drafter"], row["temperature"]) for row in rows}) >= 3
    assert all(row["step_us"] > 0 for row in rows)
