"""Rounds gone through without their kernels, as before a start on a GPU; here the interpreter's are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from paceline import LLM
from paceline.engine.replaying import ReplayingRunner


def go_through_all(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> int:
    """Warm up, with nothing captured at the end; how many launches were left out."""
    from triton.runtime.interpreter import InterpretedFunction

    from paceline.kernels.triton.compiling import Zeroed

    left_out = 0

    def launch(*given: Any, **options: Any) -> None:
        nonlocal left_out
        left_out += 1

    def prepare(self: Any, rounds: Iterable[Callable[[], object]]) -> None:
        with Zeroed():
            for go_through in rounds:
                go_through()

    runner = llm.engine.runner
    assert isinstance(runner, ReplayingRunner)
    with torch.inference_mode(), monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: launch)
        patch.setattr(type(llm.model.ops), "prepare", prepare)
        patch.setattr(ReplayingRunner, "_remember", lambda self, *given: None)
        assert list(llm.engine.warm_up())
    runner.captured.clear()
    return left_out
