"""The chat's own checkpoints, and the prompts it streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.llm import LLM as Target
from tests.cli.chat.talking import write_printable
from tests.cli.checkpoints import TEMPLATE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_printable(tmp_path_factory.mktemp("chat") / "tiny", TEMPLATE)


@pytest.fixture(scope="session")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_printable(tmp_path_factory.mktemp("chat") / "raw", None)


@pytest.fixture(scope="session")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that were streamed, the probe of plain decoding left out."""
    seen: list[str] = []
    real = Target.stream

    def stream(self: LLM, prompt: Any, params: SamplingParams) -> Any:
        if "prompt" in prompt:
            seen.append(prompt["prompt"])
        return real(self, prompt, params)

    monkeypatch.setattr(Target, "stream", stream)
    return seen
