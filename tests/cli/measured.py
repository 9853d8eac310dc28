"""What tests of `compare` and `sweep` share: a dataset of three prompts, and reading what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from paceline.cli import app

ROWS = ["the rider in front", "the rider behind rests and the rider", "then the next rider"]


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in ROWS))
    return path


def run(command: str, checkpoint: Path, folder: Path, *words: str) -> Result:
    fixed = [command, "--model", str(checkpoint), "--output", str(folder), "--max-tokens", "20"]
    if {"--max-tokens", "--max-new-tokens", "--max_new_tokens"} & set(words):
        fixed = fixed[:-2]
    return CliRunner().invoke(app, [*fixed, *words])


def read(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return data
