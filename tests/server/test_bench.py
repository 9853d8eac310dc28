"""`paceline bench serve` against our own server: what it reports is what the server counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from tests.server.serving import NAME, Served

SIZES = ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "16", "--max-concurrency", "3"]


@pytest.mark.parametrize("backend", ["paceline", "openai-chat"])
def test_the_benchmarks_figures_are_the_servers(served: Served, tmp_path: Path, backend: str) -> None:
    names = ("paceline_output_tokens_total", "paceline_prompt_tokens_total", "paceline_target_forwards_total")
    before = [served.metric(name) for name in names]
    words = ["--base-url", served.address, "--backend", backend, "--ignore-eos", *SIZES]
    result = CliRunner().invoke(app, ["bench", "serve", *words, "--save-result", "--result-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(next(tmp_path.glob("*.json")).read_text())
    figures, told = data["figures"], data["acceptance"]
    assert data["server"]["model"] == NAME and data["server"]["left_out"] == []
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_output_tokens"] == 6 * 16 and 1 <= figures["max_concurrent_requests"] <= 3
    outputs, inputs, forwards = (served.metric(name) - past for name, past in zip(names, before))
    assert outputs == 6 * 16 + 4  # and a first request, to see what the server takes
    assert inputs > figures["total_input_tokens"] >= 6 * 10
    assert told["source"] == "usage" and told["drafted"] >= told["accepted"] == sum(told["accepted_by_position"])
    assert 0 < 6 * 16 / told["tokens_per_forward"] < forwards
    assert all(request["error"] is None and len(request["gaps"]) < 16 for request in data["requests"])
