"""The contract every drafter is held to: whatever it proposes, not one token changes.

Prompts, seeds and settings are fixed once for all drafters; equality is exact, on the reference kernels.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from paceline import DraftModel, FirstOf, NGram, SamplingParams, Suffix
from tests.drafters.pair_reader import PairReader
from tests.fakes import DrawnTree, Hopeless, Oracle, Recorded, Replay, tiny_llm, tiny_model

MAX_TOKENS = 24
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True),
    "everything": SamplingParams(
        temperature=0.8,
        seed=12,
        top_p=0.9,
        top_k=30,
        min_p=0.01,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias={5: 1.5, 9: -3.0},
        bad_words=[[7], [3, 4]],
        min_tokens=6,
        stop_token_ids=[90],
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ),
}


def prompts(count: int) -> list[list[int]]:
    """Repetitive prompts of different lengths, one of them longer than two pages."""
    chooser = random.Random(count)
    lengths = (7, 23, 12)[:count]
    return [[chooser.randrange(3, 97) for _ in range(length)] * 2 for length in lengths]


@functools.cache
def plain(batch: int, setting: str) -> list[list[int]]:
    outputs = tiny_llm().generate(prompts(batch), SETTINGS[setting])
    return [output.outputs[0].token_ids for output in outputs]


def recorded(batch: int, setting: str) -> Recorded:
    """Plain sequences; drafts can reach over their end."""
    return {tuple(p): p + out for p, out in zip(prompts(batch), plain(batch, setting))}


DRAFTERS: dict[str, Callable[[Recorded], Any]] = {
    "ngram": lambda known: NGram(5, min_match=1, max_match=3),
    "ngram_transformers": lambda known: NGram(5, rule="transformers"),
    "ngram_reference": lambda known: NGram(5, rule="reference"),
    "suffix": lambda known: Suffix(),
    "suffix_tree": lambda known: Suffix(tree=True, max_spec_factor=4.0, min_token_prob=0.01),
    "draft_model": lambda known: DraftModel(tiny_model(layers=1, hidden=16, seed=1), 4),
    "draft_is_target": lambda known: DraftModel(tiny_model(), 4),
    "first_of": lambda known: FirstOf(Suffix(tree=True), DraftModel(tiny_model(), 3)),
    "oracle": lambda known: Oracle(known, 5),
    "hopeless": lambda known: Hopeless(known, 4),
    "hopeless_tree": lambda known: Hopeless(known, 4, trees=True),
    "replay": lambda known: Replay(known, seed=3, trees=False),
    "replay_tree": lambda known: Replay(known, seed=3, trees=True),
    "drawn_tree": lambda known: DrawnTree(known),
    "pruned_tree": lambda known: DrawnTree(known, keep=5),
    "pair_reader": lambda known: PairReader(),
    "first_on_device": lambda known: FirstOf(NGram(5, min_match=1, max_match=3), DraftModel(tiny_model(), 3)),
}
