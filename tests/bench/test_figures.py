"""Results as the tables of README and docs, on what the bench really records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from paceline.bench import results
from tests.bench.examples import IDS, comparison, example, record


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_comparisons_speed_ups_have_their_intervals(figures: ModuleType, tmp_path: Path) -> None:
    results.write(tmp_path / "x.json", record(example("ngram", "suffix")))
    lines = figures.render("x", tmp_path).splitlines()
    tokens = len(IDS) + 6
    per_forward = f"{tokens / (tokens - 8):.2f}"
    assert lines[2] == f"| plain | {tokens / 2:.1f} | 1.00× | 1.00 | – | 2 of 2 |"
    assert lines[3] == f"| ngram | {tokens:.1f} | 2.00× (2.00–2.00) | {per_forward} | 40% | 2 of 2 |"
    assert lines[-1].endswith(" In brackets: 95% intervals, 2000 resamples of prompts and rounds.")


def test_a_sweep_becomes_a_table_by_draft_length_with_its_verdict(figures: ModuleType, tmp_path: Path) -> None:
    data = record(comparison({"plain": [1.0, 1.0], "1": [0.8, 0.8], "3": [0.5, 0.5]}), "sweep")
    results.write(tmp_path / "x.json", data)
    lines = figures.render("x", tmp_path).splitlines()
    assert lines[0].startswith("| draft length | tokens/s | speed-up in time | speed-up in forwards |")
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| plain", "| 1", "| 3"]
    assert " | 2.00× (2.00–2.00) | " in lines[4]
    assert lines[6] == data["best"]["verdict"]
    assert lines[8].startswith("tiny, 2 prompts, at most 20 tokens each")


@pytest.mark.parametrize("name", ["compare_smollm2", "compare_qwen"])
def test_files_of_the_layout_before_intervals_are_still_read(figures: ModuleType, name: str) -> None:
    lines = figures.render(name).splitlines()
    assert lines[2].startswith("| plain | ")
    assert all(line.endswith(" |") for line in lines[:4])
