"""The measurement of dtypes, run small: what a side answers, and what is written down."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))  # as for a script: its neighbours can be imported
    module = load("bench/cpu_dtypes.py")
    sizes = {"vocab_size": 1200, "hidden_size": 36, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setattr(module, "SHAPE", module.SHAPE | sizes)
    return module


def test_a_side_answers_every_line_with_its_figures(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n2\n"))
    script.answer("float32", "bfloat16", 1)
    kernels, *turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert kernels == "native" and len(turns) == 2
    for turn in turns:
        assert tuple(turn) == script.FIGURES and all(value > 0 for value in turn.values())


class Fake:
    """A side that needs no process; the first turn's figures would show if they were counted."""

    def __init__(self, tree: Path, stored: str, asked: str, layers: int) -> None:
        self.row: dict[str, Any] = {"weights": stored, "dtype": asked, "kernels": "native"}
        self.row |= {"decode": [], "prefill": [], "rows": []}

    def turn(self, tokens: int, counts: bool) -> None:
        for name in ("decode", "prefill", "rows"):
            self.row[name] += [float(tokens)] if counts else []

    def close(self) -> None:
        pass


def test_all_counted_turns_of_both_checkouts_are_written_down(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "Side", Fake)
    output = tmp_path / "out.json"
    script.main(["--before", str(tmp_path), "--turns", "2", "--tokens", "5", "--output", str(output)])
    told = json.loads(output.read_text())
    assert [(row["when"], row["weights"], row["dtype"]) for row in told["dtypes"]] == [
        (when, *side) for side in script.SIDES for when in ("now", "before")
    ]
    assert all(row["decode"] == row["rows"] == [5.0, 5.0] for row in told["dtypes"])
    assert str(tmp_path) not in output.read_text(), "no path of this machine is written down"
