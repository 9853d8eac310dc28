"""The default model itself, in float32 on the torch kernels: transformers' greedy tokens.

transformers reads the same GGUF file; its greedy choice is checked at every position of our own output, which is
the same as decoding with it (a first difference would show as a different choice there), only faster.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.models import catalog

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "List of planets in order from the sun: Mercury,",
    "One two three four five six seven eight nine ten. One two three four",
    "import numpy as np\n\nx = np.",
]
TOKENS = 24


@functools.cache
def model_path() -> str:
    return str(catalog.ensure(catalog.DEFAULT_MODEL, progress=False))


@functools.cache
def ours() -> list[Any]:
    llm = LLM(catalog.DEFAULT_MODEL, max_model_len=512, kernels="torch")
    return llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))


@pytest.mark.filterwarnings("ignore")
def test_greedy_tokens_are_those_of_transformers(record_property: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GGUFReader", "get_tensor_name_map"):  # made anew for every tensor, each time the same
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    path = Path(model_path())
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    same = 0
    for output in ours():
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            choices = theirs(torch.tensor([tokens])).logits[0].argmax(-1)
        first = len(output.prompt_token_ids) - 1
        assert choices[first:-1].tolist() == output.outputs[0].token_ids, output.prompt
        same += TOKENS
    record_property("shown", f"SmolLM2: {same} of {len(PROMPTS) * TOKENS} greedy tokens are transformers'")
