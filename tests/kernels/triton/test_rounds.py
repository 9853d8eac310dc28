"""Whole rounds with their small work in Triton: not one token changes."""

from __future__ import annotations

import pytest
import torch

from paceline.testing import plain, tiny_llm, tokens_of
from tests.drafters.contract import DRAFTERS


@pytest.mark.parametrize(
    ("drafter", "setting"), [("ngram", "seeded"), ("draft_is_target", "everything"), ("eagle_dynamic", "greedy")]
)
def test_rounds_say_what_plain_decoding_says(drafter: str, setting: str, device: torch.device) -> None:
    from paceline.kernels.triton.rounds import TritonRounds

    if device.type != "cpu":
        pytest.skip("the tiny model is on the CPU")
    llm = tiny_llm(DRAFTERS[drafter]({}), behind=1)
    llm.engine.table.rounds = TritonRounds()
    assert tokens_of(llm, 3, setting, max_tokens=6) == [tokens[:6] for tokens in plain(3, setting)]
