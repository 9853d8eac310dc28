"""bench/gpu_join.py: what several runs found, in one file, and which rows are of which run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.bench import machine
from tests.bench.scripts import load


def found(day: str, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "part": "steps",
        **machine.record(),
        "date": f"2026-11-{day}T01:02:03",
        "revision": day,
        **more,
        "rows": [*rows],
    }


def step(shape: str, batch: int, ms: float) -> dict[str, Any]:
    return {"shape": shape, "batch": batch, "ms": ms, "reach_ms": 1.0, "peer_ms": 2.0}


def test_newer_rows_take_the_places_of_older_ones_and_the_others_say_of_which_run_they_are(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    join = load("bench/gpu_join.py")
    runs = [
        found("16", step("small", 1, 0.5), step("small", 4, 0.6), unfinished=True),
        found("17", step("small", 4, 0.7), step("large", 1, 3.0)),
        found("18", step("small", 1, 0.4)),
    ]
    into = tmp_path / "results"
    into.mkdir()
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps(run))
    given = [str(tmp_path / f"{number}.json") for number in range(3)]
    monkeypatch.setattr(sys, "argv", ["gpu_join.py", *given, "--into", str(into)])
    join.main()
    joined = json.loads((into / "gpu_steps.json").read_text())
    assert [(row["shape"], row["batch"], row["ms"]) for row in joined["rows"]] == [
        ("small", 1, 0.4),
        ("small", 4, 0.7),
        ("large", 1, 3.0),
    ]
    assert [row.get("run", {}).get("revision") for row in joined["rows"]] == [None, "17", "17"]
    assert joined["revision"] == "18" and "unfinished" not in joined
    text = figures.render("gpu_steps", into)
    assert "Of 3 rows 2 are of other runs (2026-11-17)." in text and "Cut off" not in text
    (into / "gpu_steps.json").unlink()
    monkeypatch.setattr(sys, "argv", ["gpu_join.py", given[0], "--into", str(into)])
    join.main()
    text = figures.render("gpu_steps", into)
    assert "other runs" not in text and "Cut off" in text
