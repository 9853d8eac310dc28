"""Families that are not ours, run by transformers' own modules on our pages: the same logits, and the contract."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, NGram
from paceline.models import loader
from paceline.models.base import FINAL
from paceline.models.fallback import Fallback
from paceline.testing import SITUATIONS, prompts, set_apart, tiny_model, tokens_of
from tests.fakes import Recorded, Replay
from tests.models.fallback_families import FAMILIES, SHOWN, make
from tests.models.running import CPU, SINGLY, run

LENGTH = 40
TOLERANCE = 1e-4
WAYS = {"one pass": [LENGTH], "chunks": [7, 1, 20, 12], "token by token": SINGLY}


def load(model: Any, kernels: str = "torch", impl: str = "auto") -> loader.Loaded:
    return loader.build(loader.find(model, impl=impl), torch.float32, CPU, kernels, 64)


def random_ids() -> list[int]:
    ids: list[int] = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    return ids


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, kernels: str, record_property: Callable[[str, str], None]) -> None:
    model, ids = make(name), random_ids()
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0]
    loaded = load(model, kernels, "transformers")
    assert isinstance(loaded.model, Fallback)
    said = {way: run(loaded, ids, chunks)[0] for way, chunks in WAYS.items()}
    differences = {way: float((found - wanted).abs().max()) for way, found in said.items()}
    if kernels == "reference":
        assert all(torch.equal(found, said["one pass"]) for found in said.values()), (
            "a row's bits depend on its neighbours"
        )
    record_property(
        "shown", f"{name:14} {kernels:10}" + "".join(f"  {way} {most:.1e}" for way, most in differences.items())
    )
    assert max(differences.values()) <= TOLERANCE


def make_llm(model: Any, drafter: Any = None, behind: int | None = None, **options: Any) -> LLM:
    given = {"kernels": "reference", "max_model_len": 200, "device": "cpu", **options}
    llm = LLM(model, drafter=None if behind is not None else drafter, **given)
    if behind is not None:
        set_apart(llm, behind)
        llm.set_drafter(drafter)
    return llm


DRAFTERS: dict[str, Callable[[Recorded], Any]] = {
    "replay_tree": lambda known: Replay(known, seed=3, trees=True),
    "ngram": lambda known: NGram(5, min_match=1, max_match=3),
    "draft_model": lambda known: DraftModel(tiny_model(layers=1, hidden=16, seed=1), 4),
    "draft_fallback": lambda known: DraftModel(make("bloom"), 3),
}
LAUNCHED = [name for name in SITUATIONS if name != "captured"]  # a module of transformers asks the host
CASES = list(zip(itertools.cycle(SHOWN), itertools.product(LAUNCHED, DRAFTERS)))  # families in turn


@functools.cache
def plain(name: str, batch: int, setting: str) -> list[list[int]]:
    return tokens_of(make_llm(make(name)), batch, setting)


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda number: "-".join((CASES[number][0], *CASES[number][1]))
)
def test_no_drafter_changes_a_token(number: int) -> None:
    name, (situation, drafter) = CASES[number]
    turn = number + number // len(DRAFTERS)
    batch, setting = (1, 3)[turn % 2], ("greedy", "seeded")[turn // 2 % 2]
    wanted = plain(name, batch, setting)
    known = {tuple(prompt): prompt + said for prompt, said in zip(prompts(batch), wanted)}
    made = DRAFTERS[drafter](known)
    llm = make_llm(make(name), made, **SITUATIONS[situation])
    assert tokens_of(llm, batch, setting) == wanted
    if SITUATIONS[situation].get("prefix_caching", True):
        assert tokens_of(llm, batch, setting) == wanted, "the second time pages are shared"
    if drafter == "replay_tree":
        assert max(made.histogram.lengths) > 1 and max(made.histogram.branches) > 0, "no branch was ever accepted"


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_a_family_of_ours_says_the_same_by_transformers(kernels: str) -> None:
    ids, taps = random_ids(), (0, 1, 2, FINAL)
    ours, theirs = load(tiny_model(), kernels), load(tiny_model(), kernels, "transformers")
    assert isinstance(theirs.model, Fallback) and not isinstance(ours.model, Fallback)
    for wanted, found in zip(run(ours, ids, [13, 27], taps), run(theirs, ids, [13, 27], taps)):
        assert (wanted - found).abs().max() <= TOLERANCE
