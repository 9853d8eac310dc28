"""The benchmark of experts runs, on a shape that takes no time."""

from __future__ import annotations

import sys

import pytest

from tests.bench.scripts import load
from tests.native import needs_native


@needs_native
def test_it_prints_a_line_for_every_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("bench/cpu_experts.py")
    small = {"HIDDEN": 256, "WIDE": 256, "EXPERTS": 4, "CHOSEN": 2, "LAYERS": 2, "ROWS": (1, 5)}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sys, "argv", ["cpu_experts.py", "--turns", "1"])
    module.main()
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("Q4_K") and [line.split()[0] for line in told[1:]] == ["rows", "1", "5"]
    assert [float(line.split()[-1]) <= 2 for line in told[2:]] == [True, True]
