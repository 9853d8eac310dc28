"""Engines that fall on purpose. They are built in the engine's process, so they are named, not closed over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline import LLM
from paceline.engine.update import Update
from tests.server.building import build

POISON = 77  # a token; whoever sends it as a prompt makes the next step fail


def build_fragile(folder: str, drafter: Any, options: dict[str, Any]) -> LLM:
    """Fails in a step while a prompt begins with POISON, as a bug would that one request meets. Its rounds take a
    while: whoever is under way then is still so when it falls."""
    llm = build_slow(folder, drafter, options)
    step = llm.engine.step

    def poisoned() -> None:
        step()
        if any(sequence.tokens[0] == POISON for sequence in llm.engine.scheduler.running):
            raise RuntimeError("a planted fault")

    llm.engine.step = poisoned  # type: ignore[method-assign]
    return llm


def build_slow(folder: str, drafter: Any, options: dict[str, Any]) -> LLM:
    """A round takes a while, so that requests can be met under way on any machine."""
    llm = build(folder, drafter, options)
    step = llm.step

    def slowly() -> list[Update]:
        time.sleep(0.02)
        return step()

    llm.step = slowly  # type: ignore[method-assign]
    return llm


def build_once(folder: str, drafter: Any, options: dict[str, Any]) -> LLM:
    """Can be built, and not again."""
    mark = Path(folder) / "built"
    if mark.exists():
        raise RuntimeError("planted: no second time")
    mark.touch()
    return build(folder, drafter, options)
