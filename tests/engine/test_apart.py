"""What the device and the host may know of each other: one copy a round, budgets that hold, tails that are true."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from paceline import SamplingParams
from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.engine.round import Plan, Times
from paceline.models.batch import Work
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.fakes import VOCAB, Known, Replay, Tapping, tiny_llm, tiny_model


def test_reading_a_round_touches_nothing_but_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy brings all the host wants of a round; another read would wait for the round launched after it."""
    reads: list[str] = []
    real = torch.Tensor.tolist

    def note(self: torch.Tensor) -> Any:
        names = {frame.name for frame in traceback.extract_stack(limit=12)}
        if "_commit" in names:
            reads.append("sent" if "read" in names else "another")
        return real(self)

    for name in ("ngram", "replay_tree", "first_on_device", "pruned_tree"):
        llm = tiny_llm(DRAFTERS[name](recorded(3, "greedy")), behind=1)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", note)
            patch.setattr(Replay, "observe", lambda self, seen: None)
            llm.generate(prompts(3), SETTINGS["greedy"])
    assert reads and set(reads) == {"sent"}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["none", "ngram", "draft_is_target", "replay_tree", "pair_reader"])
def test_a_round_given_its_slots_on_the_device_says_what_plain_decoding_says(name: str) -> None:
    """The round as it is captured: work that is wherever the device says, nothing sent and nothing read."""
    drafter = None if name == "none" else DRAFTERS[name](recorded(3, "seeded"))
    llm = tiny_llm(drafter, behind=0)
    engine = llm.engine
    for prompt in prompts(3):
        llm.add(prompt, SETTINGS["seeded"])
    while engine.scheduler.waiting or any(not sequence.num_output for sequence in engine.scheduler.running):
        llm.step()
    sequences = list(engine.scheduler.running)
    assert all(engine.scheduler._reach(sequence, sequence.max_length) for sequence in sequences)
    engine.table.flush()
    nodes = engine.budget.choose(3, engine.stats)
    work = [Work(sequence.slot, None, 1, nodes) for sequence in sequences]
    for sequence in sequences:
        sequence.ahead = [sequence.max_length]  # of rounds that may take it anywhere
    slots = torch.tensor([item.slot for item in work])
    for _ in range(8):
        plan = Plan(sequences, list(work), 3 if nodes else 0, 3)
        if engine.runner.listener is not None:
            engine.runner.note(engine.runner.listener, plan)
        engine.runner.run(plan, Times(0.0))
    lengths = engine.table.lengths[slots].tolist()
    for sequence, length, row in zip(sequences, lengths, engine.table.tokens.tensor[slots].tolist()):
        prompt = sequence.tokens[: sequence.prompt_length]
        wanted = prompt + plain(3, "seeded")[prompts(3).index(prompt)]
        assert row[:length] == wanted[:length] and length >= len(prompt) + 9


class Greedy(Known):
    """Gives itself a larger budget, and fills it with what is wrong."""

    name = "greedy"

    def propose(self, context: Context) -> Proposal:
        context.budgets.add_(4)
        wrong = (self.truth(context, 1) + 1 + torch.arange(8)) % VOCAB
        return Proposal.of_chains(wrong, context.budgets.clamp(max=8), self.name)


@pytest.mark.parametrize("behind", [None, 1])
def test_a_drafter_cannot_raise_its_budget(behind: int | None) -> None:
    llm = tiny_llm(Greedy(recorded(3, "greedy"), 3), behind, block_size=2)
    outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")
    assert all(len(output.outputs[0].stats.proposed) <= 3 for output in outputs)


@pytest.mark.parametrize("behind", [None, 1, 2])
def test_a_stop_that_fills_a_page_leaves_no_page_without_its_state(behind: int | None) -> None:
    """The stop's own row is never shared: its state was not kept, and a page's old state must not stand for it."""
    whole = {tuple(p): p + o for p, o in zip(prompts(3), plain(3, "greedy"))}
    drafter = Tapping(whole, seed=3)
    llm = tiny_llm(drafter, behind, block_size=4, num_pages=20, max_model_len=72)
    for prompt, text in list(whole.items()):
        for length in range(len(prompt) + 1, len(text), 1 if len(prompt) < 20 else 3):
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=[text[length - 1]])
            (output,) = llm.generate([list(prompt)], params)
            said = [*prompt, *output.outputs[0].token_ids]
            whole[*said, 7] = [*said, 7] + [5] * 8
            llm.generate([[*said, 7]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    for text, state in drafter.pairs.items():
        assert (state - states_of(text)[len(text) - 2]).abs().max() <= 1e-4, len(text)


def states_of(text: tuple[int, ...]) -> torch.Tensor:
    """[positions, 2H]: after the last norm, and after one layer, from transformers."""
    with torch.no_grad():
        states = tiny_model()(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[-1][0], states[1][0]], dim=1)
