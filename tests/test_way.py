"""A newcomer can follow a token: the lines of all functions that are entered for it are counted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import LLM, NGram, SamplingParams
from tests.fakes import tiny_model
from tests.tokens import NUM_IDS, tokenizer

MOST = 1500
DOCS = Path(__file__).resolve().parent.parent / "docs"


def script() -> Any:
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("way")
    finally:
        sys.path.remove(str(DOCS))


def test_a_token_is_followed_in_1500_lines(record_property: Callable[[str, object], None]) -> None:
    way = script()
    llm = LLM(tiny_model(vocab=NUM_IDS), tokenizer=tokenizer(), drafter=NGram(min_match=1), max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = way.follow(llm, "the rider in front rides ahead, the rider in front", params)
    lines, count = found.lines(), way.count(found)
    names = {f"{file}:{name}" for file, parts in lines.items() for name in parts}
    eight = {
        "engine/engine.py:Engine.add",
        "engine/scheduler.py:Scheduler.schedule",
        "drafters/ngram.py:NGramDrafter.propose",
        "models/batch.py:pack",
        "models/base.py:Model.forward",
        "models/llama.py:Llama.describe",
        "sampling/verify.py:follow",
        "engine/engine.py:Engine._commit",
        "engine/engine.py:Engine._emit",
    }
    assert {f"paceline/{name}" for name in eight} <= names, "the loop was not followed"
    record_property("shown", f"a token's way: {count} lines of {len(names)} functions and classes, {len(lines)} files")
    assert count <= MOST
