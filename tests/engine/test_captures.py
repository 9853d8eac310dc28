"""Which rounds are captured, and when: the usual ones at the start, so that none is captured while somebody waits."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from paceline import LLM, Eagle, FirstOf, NGram, SamplingParams, Suffix
from paceline.engine.budget import FixedBudget, MeasuredBudget
from paceline.engine.replaying import Key, ReplayingRunner
from paceline.engine.stats import EngineStats
from paceline.testing import prompts, tiny_llm
from tests.drafters.tiny_eagle import tiny_eagle

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
WARM = dataclasses.replace(GREEDY, temperature=0.8, seed=3)
HOT = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
NARROW = dataclasses.replace(WARM, top_p=0.9)


def captured_llm(drafter: Any = None, **options: Any) -> LLM:
    return tiny_llm(drafter, behind=1, captured=True, max_num_seqs=4, max_batched_tokens=32, **options)


def keys_of(llm: LLM) -> set[Key]:
    runner = llm.engine.runner
    assert isinstance(runner, ReplayingRunner)
    return set(runner.captured)


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(3), params)]


@pytest.mark.parametrize("drafter", [None, NGram(5, min_match=1)], ids=["plain", "ngram"])
def test_after_the_start_nothing_is_captured_for_greedy_requests_or_any_temperature(drafter: Any) -> None:
    llm = captured_llm(drafter)
    counted = list(llm.engine.warm_up())
    known = keys_of(llm)
    assert counted == [(number, len(known)) for number in range(len(known))]
    assert llm.engine.runner.start.rounds == len(known)
    for params in (GREEDY, WARM, HOT, [GREEDY, WARM, HOT], dataclasses.replace(GREEDY, top_k=5, top_p=0.5, min_p=0.1)):
        assert tokens(llm, params) == tokens(tiny_llm(), params)
    assert keys_of(llm) == known
    tokens(llm, NARROW)
    assert keys_of(llm) > known, "what is unusual is captured when it is first needed"


class InTurns:
    """A budget of every number of nodes that a measured one may choose."""

    def __init__(self, arms: list[int]) -> None:
        self.arms = itertools.cycle(arms)

    def choose(self, num_running: int, history: EngineStats) -> int:
        return next(self.arms)


LONG = Suffix(max_cached_requests=0, max_spec_factor=4.0, min_token_prob=0.0)


@pytest.mark.parametrize("drafter", [LONG, NGram(16, min_match=1)], ids=["suffix", "ngram"])
def test_whatever_a_measured_budget_allows_or_a_host_drafter_hands_over_was_captured_at_the_start(drafter: Any) -> None:
    """Proposals of up to 16 are of any length, beside prompts too; sizes are captured for few."""
    llm = tiny_llm(behind=1, captured=True, max_num_seqs=4, max_batched_tokens=128, max_model_len=200)
    llm.engine.budget_kind = "measured"
    llm.set_drafter(drafter)
    assert list(llm.engine.warm_up()) and isinstance(llm.engine.budget, MeasuredBudget)
    known, llm.engine.budget = keys_of(llm), InTurns(llm.engine.budget.arms)
    chooser = random.Random(1)
    asked = [[chooser.randrange(5, 40) for _ in range(6)] * chooser.randrange(2, 8) for _ in range(24)]
    llm.generate(asked, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert keys_of(llm) == known
    drafted = [record for record in llm.engine.stats.recent if record.proposed]
    assert len({record.proposed for record in drafted}) > 5 and any(record.nodes is None for record in drafted)


def test_fewer_nodes_that_nobody_captured_have_rounds_of_their_own_where_nothing_but_decoding_is_done() -> None:
    """All that the drafter may would be captured, and would cost that much more in every round."""
    llm = tiny_llm(behind=1, captured=True, max_num_seqs=8, max_batched_tokens=16, max_model_len=200)
    llm.set_drafter(NGram(16, min_match=1))
    assert list(llm.engine.warm_up())
    llm.engine.budget = FixedBudget(3)
    llm.generate([[5, 6, 7, 8] * 3] * 8, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    decoding = {record.rows for record in llm.engine.stats.recent if record.nodes is not None and record.sequences == 8}
    assert decoding == {8 * 4}


def test_whoever_comes_first_a_captured_round_serves_every_temperature_and_greed() -> None:
    asked = [GREEDY, HOT, WARM, GREEDY, [HOT, GREEDY, WARM]]
    wanted = [tokens(tiny_llm(), params) for params in asked]
    for order in ([0, 1, 2, 3, 4], [1, 2, 0, 4, 3], [4, 2, 3, 1, 0]):
        llm = captured_llm(NGram(3, min_match=1))
        for number in order:
            assert tokens(llm, asked[number]) == wanted[number]
        assert len({key.kind for key in keys_of(llm)}) == 2


def test_all_usual_top_k_share_their_rounds() -> None:
    llm, asked = captured_llm(), [dataclasses.replace(WARM, top_k=count) for count in (2, 5, 20)]
    tokens(llm, asked[2])
    known = keys_of(llm)
    assert [tokens(llm, params) for params in asked] == [tokens(tiny_llm(), params) for params in asked]
    assert keys_of(llm) == known


def test_where_a_rule_does_not_take_the_samplers_own_tokens_greedy_rounds_alone_are_captured_at_the_start() -> None:
    llm = captured_llm(acceptance="rejection")
    list(llm.engine.warm_up())
    assert {key.kind.greedy for key in keys_of(llm)} == {True}
    assert tokens(llm, GREEDY) == tokens(tiny_llm(), GREEDY)


def test_logits_are_kept_where_somebody_reads_them_and_nowhere_else() -> None:
    llm = captured_llm(NGram(3, min_match=1))
    read = dataclasses.replace(GREEDY, logprobs=2)
    wanted = [[*output.outputs[0].logprobs] for output in tiny_llm().generate(prompts(3), read)]
    tokens(llm, GREEDY)
    assert {key.logits for key in keys_of(llm)} == {False}
    assert all(captured.outcome.out.logits is None for captured in llm.engine.runner.captured.values())
    found = [[*output.outputs[0].logprobs] for output in llm.generate(prompts(3), read)]
    assert {key.logits for key in keys_of(llm)} == {False, True}
    for one, other in zip(found, wanted):
        assert [sorted(place) for place in one] == [sorted(place) for place in other]


@pytest.mark.parametrize("host", [False, True])
def test_states_are_kept_where_the_host_shows_them_to_somebody_and_nowhere_else(host: bool) -> None:
    eagle = Eagle(tiny_eagle("third"), 2)
    llm = captured_llm(FirstOf(Suffix(3), eagle) if host else eagle, budget="fixed")
    assert tokens(llm, GREEDY) == tokens(tiny_llm(), GREEDY)
    kept = [captured.outcome.out for captured in llm.engine.runner.captured.values()]
    assert kept and {out.tapped is not None for out in kept} == {host}
    assert not any(out.final.numel() for out in kept)


def test_what_drafts_were_drawn_from_is_kept_by_no_captured_round() -> None:
    given = {"budget": "fixed", "acceptance": "rejection"}
    launched = tiny_llm(Eagle(tiny_eagle("third"), 2), behind=1, max_num_seqs=4, max_batched_tokens=32, **given)
    llm = captured_llm(Eagle(tiny_eagle("third"), 2), **given)
    assert tokens(llm, HOT) == tokens(launched, HOT)
    rounds = [captured for key, captured in llm.engine.runner.captured.items() if key.drafts]
    assert rounds and all(captured.outcome.proposal.probs is None for captured in rounds)


def test_a_host_drafters_proposal_may_be_wider_than_the_budget() -> None:
    """A static tree is drawn whole, whatever fits near the end of an answer."""
    llm = captured_llm(FirstOf(Suffix(3), Eagle(tiny_eagle("first"), 25, tree="static")), budget="fixed")
    assert not llm.engine.drafter.on_device
    assert tokens(llm, GREEDY) == tokens(tiny_llm(), GREEDY)
    limited = dataclasses.replace(GREEDY, max_draft_tokens=3)
    assert tokens(llm, limited) == tokens(tiny_llm(), GREEDY)


def test_a_drafter_that_is_reset_stays_in_the_memory_that_captured_rounds_read() -> None:
    llm = captured_llm(NGram(4, rule="reference"), budget="fixed")
    wanted = tokens(llm, GREEDY)
    state = llm.engine.drafter._pace._state
    llm.engine.drafter.reset()
    assert llm.engine.drafter._pace._state is state and state[0].unique().tolist() == [4] and not state[1:].any()
    assert tokens(llm, GREEDY) == wanted
