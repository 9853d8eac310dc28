"""Trees near a text's end: what is left bounds how deep a draft is worth having, not how many branches it has."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, FirstOf, SamplingParams
from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.kernels.cpu.library import library
from tests.drafters.contract import DRAFTERS
from tests.fakes import VOCAB, Known, Recorded, check_books, set_apart, tiny_model

PROMPT = [5, 17, 42, 5, 17, 42, 9]
DEPTH, WIDTH = 3, 6


class Fan(Known):
    """On each level six siblings under the last of the level above; only the last is right. Notes its budgets."""

    name = "fan"
    trees = True

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded, DEPTH * WIDTH)
        self.budgets: list[int] = []

    def propose(self, context: Context) -> Proposal:
        self.budgets += context.budgets.tolist()
        truth = self.truth(context, DEPTH)  # [B, D]
        wrong = truth[:, :, None] + torch.arange(WIDTH - 1, -1, -1)
        parents = torch.arange(DEPTH)[:, None].expand(DEPTH, WIDTH) * WIDTH - 1
        parents = parents.flatten().expand(len(truth), -1)
        sizes = context.budgets.clamp(max=DEPTH * WIDTH)
        made = Proposal((wrong % VOCAB).flatten(1), parents, sizes, chain=False, names=("fan",), max_depth=DEPTH)
        return made.cut(sizes)


def make(drafter: Any, length: int, behind: int | None = None, **options: Any) -> LLM:
    llm = LLM(tiny_model(), **{"kernels": "reference", "max_model_len": length, "device": "cpu", **options})
    if behind is not None:
        set_apart(llm, behind)
    llm.set_drafter(drafter)
    return llm


def greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@functools.cache
def known(kernels: str = "reference") -> Recorded:
    (out,) = make(None, 200, kernels=kernels).generate([PROMPT], greedy(8))
    return {tuple(PROMPT): [*PROMPT, *out.outputs[0].token_ids]}


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("behind", [None, 1, 2])
@pytest.mark.parametrize("limit", ["the request's", "the model's"])
def test_all_branches_are_tried_when_three_tokens_are_left(limit: str, behind: int | None, block_size: int) -> None:
    """The prompt's round says one token; the tree then brings two, and the target's own is the last."""
    length = 200 if limit == "the request's" else len(PROMPT) + 4
    fan = Fan(known())
    llm = make(fan, length, behind, block_size=block_size)
    (out,) = llm.generate([PROMPT], greedy(4 if length == 200 else None))
    answer = out.outputs[0]
    assert [*PROMPT, *answer.token_ids] == known()[tuple(PROMPT)][: len(PROMPT) + 4]
    assert [told.kind for told in answer.provenance][:3] == ["plain", "accepted", "accepted"]
    assert answer.stats.rounds == 2 and answer.finish_reason == "length"
    assert fan.budgets[0] == DEPTH * WIDTH
    check_books(llm)


@pytest.mark.parametrize("behind", [None, 1])
def test_what_is_deeper_than_the_text_may_become_counts_as_not_proposed(behind: int | None) -> None:
    for left, depths in ((2, [1, 1]), (3, [1, 1, 1]), (7, [2, 2, 2])):
        (out,) = make(Fan(known()), 200, behind).generate([PROMPT], greedy(1 + left))
        assert (out.outputs[0].stats.proposed, out.outputs[0].stats.accepted) == (depths, depths), left


KERNELS = ["reference", "torch", *(["native"] if library() is not None else [])]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("left", range(1, 8))
def test_no_row_stands_beyond_the_models_positions(left: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, fan, seen = len(PROMPT) + left, Fan(known()), []
    llm = make(fan, length, kernels=kernels, block_size=4)
    model = llm.engine.target.model
    forward = model.forward

    def watched(batch: Any, *rest: Any) -> Any:
        seen.append(int(batch.positions.max()))
        return forward(batch, *rest)

    monkeypatch.setattr(model, "forward", watched)
    (out,) = llm.generate([PROMPT], greedy(None))
    assert max(seen) < length
    assert out.outputs[0].token_ids == known(kernels)[tuple(PROMPT)][len(PROMPT) : length]


TREES = [name for name in DRAFTERS if DRAFTERS[name]({}).create().trees]


NEAR_END = [PROMPT * 3, [*PROMPT, 8] * 2, PROMPT[1:] * 3]
END = 26


@functools.cache
def plain_beyond() -> Recorded:
    """What plain decoding says to those prompts, the end and a few tokens more."""
    outputs = make(None, END + 6).generate(NEAR_END, greedy(None))
    return {tuple(prompt): [*prompt, *out.outputs[0].token_ids] for prompt, out in zip(NEAR_END, outputs)}


@pytest.mark.parametrize("behind", [None, 2])
@pytest.mark.parametrize("name", TREES)
def test_every_drafter_of_trees_says_plains_text_up_to_the_models_end(name: str, behind: int | None) -> None:
    llm = make(DRAFTERS[name](plain_beyond()), END, behind, block_size=4)
    outputs = llm.generate(NEAR_END, greedy(None))
    said = [[*prompt, *out.outputs[0].token_ids] for prompt, out in zip(NEAR_END, outputs)]
    assert said == [text[:END] for text in plain_beyond().values()]
    check_books(llm)


@pytest.mark.parametrize("behind", [None, 1])
def test_a_chain_behind_a_tree_is_no_longer_than_what_is_left(behind: int | None) -> None:
    lengths: list[tuple[int, int]] = []

    class Silent(Fan):
        def propose(self, context: Context) -> Proposal:
            return Proposal.empty(len(context.slot_list), context.table.device)

    class Watched(DraftModel):
        def create(self) -> Any:
            made = super().create()
            propose = made.propose

            def noted(context: Context) -> Proposal:
                left = context.table.limits[context.slots] - context.lengths - 1
                lengths.extend(zip(context.budgets.tolist(), left.tolist()))
                return propose(context)

            made.propose = noted  # type: ignore[method-assign]
            return made

    drafters = FirstOf(Silent(known()), Watched(tiny_model(layers=1, seed=3), 5))
    llm = make(drafters, len(PROMPT) + 9, behind)
    llm.generate([PROMPT], greedy(None))
    assert lengths and all(budget <= max(left, 0) for budget, left in lengths)
