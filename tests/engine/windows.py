"""Tiny models whose layers look back only so far, with and without pages of their own for those."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import transformers

from paceline import LLM
from paceline.engine.memory import Sizes, size_cache
from paceline.testing import VOCAB, tiny_llm

WIDTH = 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WIDTH,
}


@functools.cache
def windowed_model(kind: str) -> Any:
    """mistral: every layer has a window, and the shape of `tiny_model()`; gemma3: two of three."""
    torch.manual_seed(3)
    if kind == "mistral":
        config = transformers.MistralConfig(**SHAPE, num_hidden_layers=2)
        return transformers.MistralForCausalLM(config).eval().float()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    given = {**SHAPE, "num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": kinds}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**given)).eval().float()


KINDS = ("mistral", "gemma3")


def windowed_llm(kind: str, drafter: Any = None, behind: int | None = None, **options: Any) -> LLM:
    llm = tiny_llm(drafter, behind, windowed_model(kind), **options)
    windowed = llm.engine.table.windowed
    assert windowed is not None, "its layers have no pages of their own"
    windowed.pool._free.reverse()  # else both pools would give the same numbers, and it would not matter whose they are
    return llm


def whole_llm(kind: str, **options: Any) -> LLM:
    """The same, all layers under the same pages, of which none is given back."""

    def size(target: Any, drafter: Any, *rest: Any) -> Sizes:
        kept = size_cache(target, drafter, *rest)
        return Sizes(kept.num_pages, None, 0)

    with mock.patch("paceline.llm.size_cache", size):
        llm = tiny_llm(None, None, windowed_model(kind), **options)
    assert llm.engine.table.windowed is None
    return llm
