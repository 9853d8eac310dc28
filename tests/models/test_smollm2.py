"""The default model itself: transformers' greedy tokens, and the same text with and without a drafter.

transformers reads the same GGUF file; its greedy choice is checked at every position of our own output, which is
the same as decoding with it (a first difference would show as a different choice there), only faster.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from paceline import LLM, NGram, SamplingParams, Suffix
from paceline.models import catalog

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In 1969, the first humans to walk on the moon were",
    "A recipe for pancakes: take two eggs,",
    "The opposite of cold is",
    "List of planets in order from the sun: Mercury,",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be, that is",
    "The main difference between a cat and a dog is",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which",
    "One two three four five six seven eight nine ten. One two three four",
    "Q: What is 7 times 8?\nA:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "import numpy as np\n\nx = np.",
    "My favourite season is autumn because",
    "Shakespeare wrote many plays, such as",
]
TOKENS = 64


@functools.cache
def model_path() -> str:
    return str(catalog.ensure(catalog.DEFAULT_MODEL, progress=False))


@functools.cache
def ours() -> tuple[LLM, list[Any]]:
    llm = LLM(catalog.DEFAULT_MODEL, max_model_len=512)
    return llm, llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))


@pytest.mark.filterwarnings("ignore")
def test_greedy_tokens_are_those_of_transformers(record_property: Any) -> None:
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    path = Path(model_path())
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    same = 0
    for output in ours()[1]:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            choices = theirs(torch.tensor([tokens])).logits[0].argmax(-1)
        first = len(output.prompt_token_ids) - 1
        assert choices[first:-1].tolist() == output.outputs[0].token_ids, output.prompt
        same += TOKENS
    record_property("shown", f"SmolLM2: {same} of {len(PROMPTS) * TOKENS} greedy tokens are transformers'")


@pytest.mark.parametrize("drafter", [NGram(5, 1, 3), Suffix(tree=True)], ids=["ngram", "suffix_tree"])
def test_speculation_on_the_real_model_says_the_same(drafter: Any, record_property: Any) -> None:
    llm, plain = ours()
    llm.set_drafter(drafter)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:8], params)
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, plain))
    record_property("shown", f"SmolLM2, {type(drafter).__name__}: {same} of 8 texts identical to plain decoding")
    forwards = sum(output.outputs[0].stats.rounds for output in outputs)
    assert forwards < 8 * TOKENS
    # PyTorch's matmul is not row-invariant: until our own kernels are, a tie in the last bits may fall otherwise.
    assert same >= 7
