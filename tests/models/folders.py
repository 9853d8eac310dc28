"""Hugging Face folders to test with: how they are spoilt, and how a good one answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError
from tests.fakes import tiny_model
from tests.sentences import assert_sentence

PROMPT = [5, 9, 22]


def greedy(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


def continued(model: Any) -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, 3:]]


@functools.cache
def expected() -> list[int]:
    return continued(tiny_model())


def assert_works(llm: LLM) -> None:
    assert greedy(llm) == expected()


def load(folder: Path) -> LLM:
    return LLM(str(folder), kernels="reference", max_model_len=32)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refuse(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert_sentence(caught.value, *named)
