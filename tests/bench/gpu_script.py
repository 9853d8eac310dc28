"""bench/gpu.py, run small on a CPU by the tests of its parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import tiny_model

SMALL = ["--device", "cpu", "--dtype", "float32", "--kernels", "native", "--quick", "--turns", "1", "--batches", "1"]
SMALL += ["--shapes", "llama-8b", "--large", "none", "--prompts", "6", "--alone", "1"]


def run(gpu: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    """Every part's file."""
    tiny_model().save_pretrained(folder / "tiny")
    words = (*words, *SMALL, "--small", str(folder / "tiny"), "--output", str(folder / "results"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    assert gpu.main() == 0
    found = {path.stem: path.read_text() for path in (folder / "results").iterdir()}
    assert not any(str(folder) in text for text in found.values()), "a place on this machine was written down"
    return {name.removeprefix("gpu_"): json.loads(text) for name, text in found.items()}
