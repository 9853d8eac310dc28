"""bench/gpu_matmul.py, run small under the interpreter: what it launches, and that rows keep their bits. No time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.scripts import ROOT, load

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there it is measured in earnest")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tables: Any) -> Any:
    """With tiny models, and calls that are made once and not timed."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module: Any = load("bench/gpu_matmul.py")
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(module, "MODELS", {"small": (2, 48, 64, 32, 80)})
    monkeypatch.setattr(module, "HEADS", {"small": 64})
    for name, value in {"ROWS": (1, 17), "COUNTS": (1, 17), "TRIED": 17, "LAUNCHES": 1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "KINDS", module.KINDS[:5])
    monkeypatch.setattr(module.tuning, "BEYOND_CACHE", 1)
    monkeypatch.setattr(
        module.tuning, "prepare", lambda products: [module.kernels.launching_of(*one) for one in products]
    )
    monkeypatch.setattr(module.tuning, "measure", lambda calls: (calls[0](), 1.0)[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield module
    sys.modules.pop("gpu_matmul", None)


def test_every_product_is_launched_as_a_layer_has_it_and_keeps_its_bits(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    matmul = script.kernels.matmul

    def watched(x: Any, *given: Any, **more: Any) -> Any:
        left.append(more.get("left") is not None or isinstance(x, script.kernels.Folded))
        return matmul(x, *given, **more)

    monkeypatch.setattr(script.kernels, "matmul", watched)
    script.run(tmp_path / "found.json", "--rows", "1,17", "--tiles", str(tmp_path / "none.json"))
    found = json.loads((tmp_path / "found.json").read_text())["products"]
    assert {line["product"] for line in found} == {"qkv", "out", "gate_up", "down", "head", "states", "pairs"}
    assert {line["keeps_bits"] for line in found} == {True, None} and any(left) and not all(left)
    assert "all products of a step" in capsys.readouterr().out
