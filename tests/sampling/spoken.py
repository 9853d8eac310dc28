"""Texts spoken many times over, by `draw` and `verify` alone and by the engine, and counted."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from paceline import LLM, SamplingParams
from paceline.cache.slots import Slots
from paceline.drafters.tree import Proposal
from paceline.engine.context import DraftContext
from paceline.sampling.processors import process
from paceline.sampling.rules import RULES
from paceline.sampling.state import Rows, SamplerState, Words
from paceline.sampling.verify import Judged, verify
from tests.sampling.checks import CPU, fits

ALPHA, POWER = 1e-4, 0.99


SAMPLES, SMALL = 20_000, 6  # draw and verify alone
LEAST = 0.15  # the chance below which a chain is shortened


TEXTS, VOCAB = 4096, 11  # through the engine


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 10, 0, 3, 1]


@cache
def filled_state() -> SamplerState:
    """20000 slots with the same two tokens and nothing asked for; slot and seed are one number."""
    state = SamplerState(Slots(SAMPLES, 8, 1, CPU), SMALL, CPU)
    for slot in range(SAMPLES):
        state.table.begin(slot, [1, 2], 2)
        state.set(slot, SamplingParams(), Words([], []), slot, 0)
    return state


def judge_drawn(parents: list[int], acceptance: str, how: str = "drawn") -> tuple[Judged, np.ndarray]:
    """20000 sequences, each with a tree drawn by DraftContext; and p, a row a depth.

    how: drawn; shortened, where its chain is unlikely; or chosen, always the same.
    """
    draws = np.random.default_rng(5)
    deepest = 4
    p = torch.from_numpy(draws.normal(0, 1, (deepest, SMALL))).float()
    q = torch.from_numpy(draws.normal(0, 1, (deepest, SMALL))).float()
    state = filled_state()
    slots = list(range(SAMPLES))
    depth = [0] * len(parents)
    context = DraftContext(slots, [len(parents)] * SAMPLES, state, RULES[acceptance])
    for parent, nodes in itertools.groupby(range(len(parents)), key=lambda node: parents[node]):
        family = list(nodes)
        for node in family:
            depth[node] = 1 + (depth[parent] if parent >= 0 else 0)
        above = torch.full((SAMPLES, 1), parent, dtype=torch.int64)
        context.draw(q[depth[family[0]] - 1].expand(SAMPLES, 1, -1), above, len(family))
    most = context.likely(LEAST) if how == "shortened" else None
    proposal = context.drawn("drawn", chain=parents == list(range(-1, len(parents) - 1)), most=most)
    if how == "chosen":
        chosen = torch.tensor([node % SMALL for node in range(len(parents))]).expand(SAMPLES, -1).clone()
        proposal = Proposal(chosen, proposal.parents, proposal.sizes, proposal.chain)
    size = 1 + len(parents)
    owner = torch.arange(SAMPLES).repeat_interleave(size)
    below = torch.tensor([0, *depth]).repeat(SAMPLES)
    rows = Rows(owner, slots, 1 + below, torch.zeros(len(owner), 0, dtype=torch.int64))
    logits = process(p[below], rows, state)
    judged = Judged(proposal, logits, rows, torch.arange(len(owner)).view(SAMPLES, size), state)
    return judged, torch.softmax(p.double(), 1).numpy()


def check_spoken(parents: list[int], acceptance: str, how: str = "drawn") -> None:
    """The token at each depth, among the sequences that got there, is distributed as the target's."""
    judged, p = judge_drawn(parents, acceptance, how)
    verdict = verify(judged, RULES[acceptance])
    assert int(verdict.lengths.max()) > 0 and int(verdict.lengths.min()) == 0
    first = np.bincount(verdict.tokens[:, 0].numpy(), minlength=SMALL)
    fine, said = fits(first, SAMPLES * p[0], ALPHA)
    assert fine, f"first token: {said}"
    check_second(verdict.tokens.numpy(), p)


def check_second(tokens: np.ndarray, p: np.ndarray) -> None:
    """A round that ended after one token leaves the second to the target; p depends on depth alone."""
    draws = np.random.default_rng(6)
    own = draws.choice(SMALL, len(tokens), p=p[1])
    second = np.where(tokens[:, 1] >= 0, tokens[:, 1], own)
    pairs = np.bincount(tokens[:, 0] * SMALL + second, minlength=SMALL**2)
    fine, said = fits(pairs, len(tokens) * np.outer(p[0], p[1]), ALPHA)
    assert fine, f"first two tokens: {said}"


SHAPES = {
    "chain": [-1, 0, 1],
    "siblings": [-1, -1, -1],
    "tree": [-1, -1, 0, 0, 1, 1],
}


@cache
def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return transformers.LlamaForCausalLM(config).eval()


@cache
def chain_of(temperature: float) -> np.ndarray:
    """P(t1, t2, t3) by running the transformers model after the prompt and every continuation of two tokens."""
    texts = list(itertools.product(range(VOCAB), repeat=2))
    with torch.no_grad():
        logits = model_of(0)(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -3:].double() / temperature
    p = torch.softmax(logits, -1).numpy().reshape(VOCAB, VOCAB, 3, VOCAB)
    first, second = p[0, 0, 0], p[:, 0, 1]
    return first[:, None, None] * second[:, :, None] * p[:, :, 2]


def make_llm(acceptance: str, drafter: Any) -> LLM:
    sizes = {"max_model_len": 32, "max_num_seqs": 256, "max_batched_tokens": 8192}
    return LLM(model_of(0), drafter, kernels="torch", acceptance=acceptance, **sizes)


def speak(llm: LLM, temperature: float) -> tuple[np.ndarray, dict[str, int]]:
    """4096 texts of three tokens: 64 requests with seeds of their own, 64 samples each; and where tokens came from."""
    asked = [SamplingParams(temperature, n=64, max_tokens=4, seed=seed, ignore_eos=True) for seed in range(TEXTS // 64)]
    outputs = [sample for request in llm.generate([PROMPT] * len(asked), asked) for sample in request.outputs]
    kinds: dict[str, int] = {}
    for sample in outputs:
        for told in sample.provenance:
            kinds[told.kind] = kinds.get(told.kind, 0) + 1
    return np.array([sample.token_ids[:3] for sample in outputs]), kinds


def check_text(texts: np.ndarray, truth: np.ndarray) -> None:
    """The first two tokens together, and the second and third together."""
    for one, other, expected in ((0, 1, truth.sum(2)), (1, 2, truth.sum(0))):
        pairs = np.bincount(texts[:, one] * VOCAB + texts[:, other], minlength=VOCAB**2)
        fine, said = fits(pairs, len(texts) * expected, ALPHA)
        assert fine, f"tokens {one + 1} and {other + 1}: {said}"
