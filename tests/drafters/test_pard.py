"""PARD: one pass of a causal model over what is unread and k-1 mask tokens; transformers' own model is the oracle."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, Pard, SamplingParams
from paceline.drafters import make
from paceline.errors import PacelineError
from paceline.models.fallback import Fallback
from tests.drafters.equations import Spy
from tests.drafters.tiny_readers import MASK, pard_model, shared, write_pard
from tests.fakes import VOCAB, set_apart, tiny_llm, tiny_model
from tests.models.fallback_families import make as make_fallback

PROMPTS = [[(5 * i * i + 3 * i + n) % 90 for i in range(9 + 5 * n)] for n in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@functools.cache
def agreeing() -> Any:
    """The target itself: its first draft is always right, those behind mask tokens now and then."""
    return copy.deepcopy(tiny_model())


def block_of(model: Any, text: list[int], count: int, mask: int = MASK) -> list[int]:
    """The choices of the last `count` rows of text and mask tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([[*text, *[mask] * (count - 1)]])).logits[0]
    return [int(row[:VOCAB].argmax()) for row in logits[-count:]] if count else []


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("behind", [None, 1, 2])
def test_drafts_are_the_choices_behind_mask_tokens_after_any_accepted_count(behind: int | None) -> None:
    spy = Spy(Pard(agreeing(), 3, pard_token=MASK))
    llm = tiny_llm(spy, behind, block_size=4)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    assert [output.token_ids for output in outputs] == tokens_of(tiny_llm())
    accepted = {len([t for t in o.provenance if t.round == r]) - 1 for o in outputs for r in range(1, o.stats.rounds)}
    assert len(accepted) > 1 and all(output.stats.acceptance_by_position[0] == 1.0 for output in outputs)
    for text, _, drafts, _ in spy.seen:
        assert drafts == block_of(agreeing(), text, len(drafts))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_every_set_of_kernels_drafts_the_same(kernels: str) -> None:
    spy = Spy(Pard(shared("pard"), 4, quantization="none"))
    tokens_of(tiny_llm(spy, kernels=kernels))
    assert len(spy.seen) > 20
    for text, _, drafts, _ in spy.seen:
        assert drafts == block_of(pard_model(), text, len(drafts))


def test_a_round_is_one_pass_of_its_model() -> None:
    for behind in (None, 1):
        spy = Spy(Pard(shared("pard"), 4))
        llm = tiny_llm(spy, behind)
        run, passes = spy.made.run, []
        spy.made.run = lambda batch, rows, run=run, passes=passes: (passes.append(rows), run(batch, rows))[1]
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        assert len(passes) == len(spy.seen) > 4


def test_a_mask_token_that_the_target_does_not_have_is_none_of_its_ids(tmp_path: Path) -> None:
    """Its head and embedding are longer than the target's; what is behind them is never proposed."""
    model = pard_model(vocab=104)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] *= 30
    spy = Spy(make(str(write_pard(tmp_path, model, mask=103))))
    assert spy.config == Pard(str(tmp_path))
    assert tokens_of(tiny_llm(spy)) == tokens_of(tiny_llm())
    for text, _, drafts, _ in spy.seen:
        assert drafts == block_of(model, text, len(drafts), mask=103)


@pytest.mark.parametrize("behind", [None, 1])
def test_budgets_of_their_own_spoil_nobodys_drafts(behind: int | None) -> None:
    spy = Spy(Pard(shared("pard"), 6))
    llm = tiny_llm(spy, behind, block_size=4)
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, max_draft_tokens=n) for n in (6, 1, 3)]
    llm.generate(PROMPTS, params)
    assert {len(drafts) for _, _, drafts, _ in spy.seen} >= {1, 3, 6}
    for text, _, drafts, _ in spy.seen:
        assert drafts == block_of(pard_model(), text, len(drafts))


def test_a_draft_model_is_not_taken_for_one_and_it_is_not_taken_for_a_draft_model(tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "pard", mask=None)
    with pytest.raises(PacelineError, match="gives pard_token=None; a PARD drafter needs one that"):
        tiny_llm(Pard(str(folder)))
    with pytest.raises(PacelineError, match="gives pard_token=97; a PARD drafter needs one"):
        tiny_llm(Pard(str(write_pard(tmp_path / "outside", mask=97))))
    with pytest.raises(PacelineError, match="holds a PARD drafter, not a draft model; write pard:model="):
        tiny_llm(DraftModel(shared("pard")))
    assert json.loads((Path(shared("pard")) / "config.json").read_text())["pard_token"] == MASK
    with pytest.raises(PacelineError, match="num_draft_tokens=0 is not allowed"):
        Pard("d", 0)


def test_native_kernels_pack_its_weights_as_int8_unless_told_otherwise() -> None:
    found = []
    for quantization in ("int8", "none"):
        llm = tiny_llm(Pard(agreeing(), 3, MASK, quantization=quantization), kernels="native")
        assert tokens_of(llm) == tokens_of(tiny_llm(kernels="native"))
        found.append(llm.engine.drafter.model.ops.quantization)  # type: ignore[union-attr]
    assert found == ["Q8_0", None]


def test_a_model_that_transformers_runs_keeps_its_floats() -> None:
    llm = tiny_llm(Pard(make_fallback("phi3"), 3, MASK), kernels="auto")
    assert llm.model.ops.name == "native" and tokens_of(llm) == tokens_of(tiny_llm(kernels="native"))
    assert isinstance(llm.engine.drafter.model, Fallback)  # type: ignore[union-attr]


def test_it_is_switched_on_in_the_middle() -> None:
    for behind in (None, 1):
        llm = tiny_llm(block_size=4) if behind is None else set_apart(tiny_llm(block_size=4), behind)
        spy, tokens = Spy(Pard(shared("pard"), 3)), []
        for chunk in llm.stream(PROMPTS[1], GREEDY):
            tokens += chunk.token_ids
            if len(tokens) == 5:
                llm.set_drafter(spy)
        assert tokens == tokens_of(tiny_llm())[1] and len(spy.seen) > 10
        for text, _, drafts, _ in spy.seen:
            assert drafts == block_of(pard_model(), text, len(drafts))
