"""Early exit against transformers' own model with its last layers taken off."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, EarlyExit, SamplingParams
from paceline.drafters.base import Context, Needs
from paceline.drafters.early_exit import EarlyExitDrafter
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from tests.fakes import tiny_llm, tiny_model
from tests.native import EXACT

PROMPTS = [[5, 9, 14, 3] * 3, [61, 7, 7, 20, 33], list(range(40, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Spied(EarlyExitDrafter):
    """Keeps every draft with the text it was made for."""

    def __init__(self, config: EarlyExit) -> None:
        super().__init__(config)
        self.seen: list[tuple[list[int], list[int]]] = []

    def create(self) -> Spied:
        return self

    def propose(self, context: Context) -> Proposal:
        proposal = super().propose(context)
        for row, slot in enumerate(context.slot_list):
            length, size = int(context.lengths[row]), int(context.budgets[row])
            text = context.table.tokens.tensor[slot, :length].tolist()
            self.seen.append((text, proposal.tokens[row, :size].tolist()))
        return proposal


@functools.cache
def whole(family: str) -> Any:
    """A target of four layers."""
    torch.manual_seed(4)
    if family == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=128, initializer_range=0.4, eos_token_id=2
        )
        return transformers.GPT2LMHeadModel(gpt2).eval().float()
    if family == "opt":
        opt = transformers.OPTConfig(
            vocab_size=97,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
            init_std=0.4,
            word_embed_proj_dim=16,
            do_layer_norm_before=False,
        )
        return transformers.OPTForCausalLM(opt).eval().float()
    return tiny_model(layers=4)


def shortened(family: str, count: int) -> Any:
    model = copy.deepcopy(whole(family))
    body = model.base_model.decoder if family == "opt" else model.base_model
    name = "h" if family == "gpt2" else "layers"
    setattr(body, name, getattr(body, name)[:count])
    return model


@torch.inference_mode()
def drafts(model: Any, text: list[int], count: int) -> list[int]:
    said = list(text)
    for _ in range(count):
        said.append(int(model(torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
    return said[len(text) :]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("kernels", EXACT)
def test_a_draft_is_what_the_target_without_its_last_layers_says(family: str, kernels: str) -> None:
    """Three sequences together, each draft against the short model by itself."""
    drafter = Spied(EarlyExit(3, layers=2))
    llm = LLM(whole(family), drafter, kernels=kernels, max_model_len=100, device="cpu", block_size=4)
    found = llm.generate(PROMPTS, GREEDY)
    llm.set_drafter(None)
    assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] == [
        one.outputs[0].token_ids for one in found
    ]
    short = shortened(family, 2)
    assert len(drafter.seen) > 20
    wrong = [text for text, said in drafter.seen[::3] if said != drafts(short, text, len(said))]
    assert not wrong


@pytest.mark.parametrize("kernels", EXACT)
@pytest.mark.parametrize("seed", [None, 3])
def test_all_layers_are_always_right(kernels: str, seed: int | None) -> None:
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=25, ignore_eos=True)
    llm = tiny_llm(EarlyExit(4, layers=2), kernels=kernels)
    for output in llm.generate(PROMPTS, params):
        assert output.outputs[0].stats.acceptance == 1.0 and output.outputs[0].stats.rounds == 6


def test_it_borrows_all_it_needs() -> None:
    llm = tiny_llm(EarlyExit(layers=1))
    drafter, target = llm.engine.drafter, llm.engine.target
    assert isinstance(drafter, EarlyExitDrafter)
    assert drafter.plan(target) == Needs()
    assert drafter._caches is llm.engine.cache.layers and drafter.model.layers[0] is target.model.layers[0]
    assert len(target.model.layers) == 2, "the target itself keeps its layers"


@pytest.mark.parametrize("layers, given, used", [(2, None, 1), (8, None, 2), (8, 3, 3)])
def test_a_quarter_of_the_layers_unless_told(layers: int, given: int | None, used: int) -> None:
    llm = LLM(tiny_model(layers=layers), EarlyExit(layers=given), kernels="reference", max_model_len=64, device="cpu")
    assert isinstance(llm.engine.drafter, EarlyExitDrafter)
    assert len(llm.engine.drafter.model.layers) == llm.engine.drafter.model.config.num_layers == used


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="early exit after 3 layers was asked for, but the target has 2"):
        tiny_llm(EarlyExit(layers=3))
    with pytest.raises(OptionError, match="layers=0 is not allowed; allowed: a whole number, 1 or more"):
        EarlyExit(layers=0)
    with pytest.raises(OptionError, match="num_draft_tokens=True is not allowed; allowed: a whole number, 1 or more"):
        EarlyExit(True)
