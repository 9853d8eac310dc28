"""Tapped states reach the drafter at the right positions: chunks, trees, prefix hits and all."""

from __future__ import annotations

import torch

from tests.drafters.contract import SETTINGS, plain, prompts, recorded
from tests.fakes import Tapping, tiny_llm, tiny_model


def wanted_states(tokens: list[int]) -> torch.Tensor:
    """[positions, 2H]: after the last norm, and after one layer, from transformers."""
    with torch.no_grad():
        states = tiny_model()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[-1][0], states[1][0]], dim=1)


def test_every_pair_holds_the_following_token_and_the_targets_own_state() -> None:
    drafter = Tapping(recorded(3, "greedy"), seed=5)
    llm = tiny_llm(drafter, max_batched_tokens=9, block_size=8)
    outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")
    checked = 0
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        states = wanted_states(tokens)
        slot = next(s for s in range(64) if (s, 0) in drafter.pairs and drafter.pairs[s, 0][0] == tokens[1])
        for position in range(len(tokens) - 1):
            following, state = drafter.pairs[slot, position]
            assert following == tokens[position + 1]
            assert (state - states[position]).abs().max() <= 1e-4
            checked += 1
    assert checked == sum(len(p) for p in prompts(3)) + 3 * 24 - 3


def test_after_a_prefix_hit_the_state_before_it_is_handed_over() -> None:
    drafter = Tapping(recorded(3, "greedy"), seed=5)
    llm = tiny_llm(drafter, block_size=8)
    for _ in range(2):
        outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    hits = [output.outputs[0].stats.prefix_hit for output in outputs]
    assert min(hits) >= 8 and all(hit % 8 == 0 for hit in hits)
    for output, hit in zip(outputs, hits):
        states = wanted_states(output.prompt_token_ids)
        found = [state for (_, start), state in drafter.carried.items() if start == hit]
        assert any((state - states[hit - 1]).abs().max() <= 1e-4 for state in found)
