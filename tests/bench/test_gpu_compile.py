"""bench/gpu_compile.py: every kernel that rounds launch on a GPU can be compiled for one, on a machine without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.scripts import ROOT

pytest.importorskip("triton")

LAUNCHED = {"product", "product_of_boxes", "look", "store_heads", "_sample_kernel", "_walk_kernel", "_pack_kernel"}
LAUNCHED |= {
    "_link_kernel",
    "_branch_kernel",
    "_grow_kernel",
    "_keep_kernel",
    "_look_up_kernel",
    "_join",
    "_moves_kernel",
}


def test_all_kernels_of_rounds_can_be_compiled_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    words = ["--shapes", "smollm2", "--rounds", "chain", "fixed", "grown", "ngram", "--sequences", "1", "--rows", "32"]
    command = [sys.executable, "bench/gpu_compile.py", *words, "--output", str(tmp_path / "found.json")]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = {**inherited, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["failed"] for row in found] == [{}] * 4
    assert {kernel["kernel"] for row in found for kernel in row["kernels"]} >= LAUNCHED
    assert all(kernel["registers"] > 0 for row in found for kernel in row["kernels"])
    assert {one["nodes"] for row in found for one in row["rounds"]} == {0, 5, 31}
