"""Rounds are replayed whatever is asked for, as far as tensors can say it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from paceline import LLM, FirstOf, SamplingParams, Suffix
from paceline.engine.device import DeviceRunner
from paceline.engine.replaying import ReplayingRunner
from paceline.engine.round import Plan
from paceline.prompts import Prompt
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.engine.asking import Scripted
from tests.fakes import DrawnTree, Oracle, tiny_llm

GREEDY = SETTINGS["greedy"]


@functools.cache
def asked(name: str) -> SamplingParams:
    """What changes an answer of plain decoding: its own tokens are banned, alone or behind those before."""
    first, second, third = plain(3, "greedy")
    many = [first[1:3], second[:4], third[:2], *([token] for token in third[3:7]), first[4:8]]
    if name == "least":
        return replace(GREEDY, min_tokens=9, stop_token_ids=[first[2], second[3], third[5]])
    if name == "everything":
        return replace(SETTINGS[name], bad_words=many)
    return replace(GREEDY, bad_words=[[first[1]]] if name == "one" else many)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a round was captured, replayed and launched."""
    counted: Counter[str] = Counter()

    def counting(way: str) -> Any:
        real = getattr(of[way], way)

        def count(*given: Any) -> Any:
            counted[way] += 1
            return real(*given)

        return count

    of = {"_remember": ReplayingRunner, "_replay": ReplayingRunner, "_launch": DeviceRunner}
    for way, runner in of.items():
        monkeypatch.setattr(runner, way, counting(way))
    return counted


@functools.cache
def shared() -> LLM:
    return tiny_llm()


def said(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(3), params)]


@functools.cache
def wanted(name: str) -> list[list[int]]:
    return said(shared(), [asked(name), GREEDY, GREEDY])


@pytest.mark.parametrize("drafter", ["none", "drawn_tree"])
def test_bad_words_and_minimum_lengths_are_replayed_and_say_what_they_say_launched(
    drafter: str, ways: Counter[str]
) -> None:
    """Each beside two requests without wishes."""
    llm = tiny_llm(None if drafter == "none" else DRAFTERS[drafter](recorded(3, "greedy")), behind=1, captured=True)
    for name in ("many", "least", "everything"):
        assert wanted(name)[0] != plain(3, "greedy")[0] and wanted(name)[1:] == plain(3, "greedy")[1:]
        assert said(llm, [asked(name), GREEDY, GREEDY]) == wanted(name)
    assert ways["_replay"] >= 30 and not ways["_launch"]


def forbid(output: list[int], logits: Tensor) -> Tensor:
    """Never the likeliest behind an even number of tokens."""
    if len(output) % 2 == 0:
        logits[logits.argmax()] = float("-inf")
    return logits


def forbid_sum(output: list[int], logits: Tensor) -> Tensor:
    """What may not be said depends on every token before."""
    logits[sum(output) % 3 :: 3] = float("-inf")
    return logits


@pytest.mark.parametrize("drafter, launched", [("none", False), ("suffix_tree", False), ("medusa_tree", True)])
def test_behind_a_replayed_forward_functions_of_users_say_what_they_say_launched(
    drafter: str, launched: bool, ways: Counter[str]
) -> None:
    """Where drafts are drawn they have a part in those, and all of the round is launched."""
    llm = tiny_llm(None if drafter == "none" else DRAFTERS[drafter](recorded(3, "greedy")), behind=1, captured=True)
    params = [replace(GREEDY, logits_processors=[forbid]), GREEDY, GREEDY]
    wanted = said(shared(), params)
    assert wanted[0] != plain(3, "greedy")[0] and wanted[1:] == plain(3, "greedy")[1:]
    for _ in range(2):  # what was said once is expected the second time
        assert said(llm, params) == wanted
    assert bool(ways["_launch"]) == launched and ways["_replay"] >= (1 if launched else 10)
    assert drafter == "none" or any(round.accepted for round in llm.engine.stats.recent)


def test_functions_of_users_see_the_tree_of_their_own_round_behind_a_replayed_forward(ways: Counter[str]) -> None:
    params = [replace(GREEDY, logits_processors=[forbid_sum])] * 3
    wanted = said(shared(), params)
    known = {tuple(prompt): prompt + text + [5] * 9 for prompt, text in zip(prompts(3), wanted)}
    llm = tiny_llm(FirstOf(Suffix(), DrawnTree(known)), behind=1, captured=True)
    assert said(llm, params) == wanted and not ways["_launch"]
    assert any(round.accepted for round in llm.engine.stats.recent)


def test_a_wider_table_of_bans_is_captured_anew_and_nothing_else_is(ways: Counter[str]) -> None:
    llm = tiny_llm(behind=1, captured=True)
    captured = []
    for name in ("none", "one", "one", "none", "many", "one", "none"):
        before, params = ways["_remember"], GREEDY if name == "none" else asked(name)
        llm.generate([prompts(1)[0]], replace(params, max_tokens=3))
        captured.append(ways["_remember"] > before)
    assert captured == [True, True, False, False, True, False, False]
    assert [tuple(shape[1:]) for shape in llm.engine.runner.state.ban_shapes] == [(8, 5), (1, 2)]


def test_a_round_does_what_it_was_captured_for_whoever_has_its_slots_by_now(ways: Counter[str]) -> None:
    """Captured with one slot, replayed with another, while the first is a request's that asks for nothing."""
    llm, (short, long) = tiny_llm(behind=1, captured=True), prompts(3)[:2]
    params = replace(GREEDY, allowed_token_ids=[5, 9, 22, 41, 60, 80])
    (alone,) = shared().generate([long], params)
    assert llm.generate([long], params)[0].outputs[0].token_ids == alone.outputs[0].token_ids
    before = ways["_replay"]
    _, beside = llm.generate([short, long], [replace(GREEDY, max_tokens=2), params])
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert ways["_replay"] > before and not ways["_launch"]


def test_a_tree_from_the_host_may_be_wider_than_what_a_request_allows(ways: Counter[str]) -> None:
    drafter = FirstOf(Suffix(), DrawnTree(recorded(1, "greedy")))
    llm = tiny_llm(drafter, behind=1, captured=True)
    (output,) = llm.generate(prompts(1), replace(GREEDY, max_draft_tokens=1))
    assert output.outputs[0].token_ids == plain(1, "greedy")[0] and not ways["_launch"]
    assert sum(output.outputs[0].stats.proposed_by["drawn_tree"]) > 1


def test_a_request_for_its_prompts_logprobs_is_launched_at_its_prompt_alone(ways: Counter[str]) -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    llm = tiny_llm(behind=1, captured=True)
    (output,) = llm.generate([prompts(1)[0]], params)
    assert output.outputs[0].token_ids == plain(1, "greedy")[0] and output.prompt_logprobs is not None
    assert ways["_launch"] == 1 and ways["_replay"] >= len(output.outputs[0].token_ids) - 1


@pytest.mark.parametrize("name", ["none", "oracle", "suffix"])
def test_what_most_rounds_are_is_captured_before_the_first(name: str, ways: Counter[str]) -> None:
    """Drafts of full width too, whether they come from the device or from the host."""
    drafter = {"none": None, "oracle": Oracle(recorded(1, "greedy"), 2), "suffix": Suffix(2, max_spec_factor=9.0)}[name]
    llm = tiny_llm(drafter, behind=1, captured=True, max_num_seqs=2, max_batched_tokens=32)
    assert isinstance(llm.engine.runner, ReplayingRunner)
    done, captured = list(llm.engine.warm_up()), llm.engine.runner.captured
    before = {*captured}
    assert len(done) == len(before) == (5 if name == "none" else 10)
    for _ in range(2):  # what was said once is expected the second time
        (output,) = llm.generate([prompts(1)[0]], replace(GREEDY, max_tokens=4))
        assert output.outputs[0].token_ids == plain(1, "greedy")[0][:4]
    assert not ways["_launch"] and {size.nodes for size, *_ in captured.keys() - before} <= {1}, "a text's last tokens"
    assert max(round.proposed for round in llm.engine.stats.recent) == (0 if name == "none" else 2)


def test_a_round_knows_the_budget_it_was_planned_with_though_nobody_may_have_as_many() -> None:
    llm = tiny_llm(Oracle(recorded(1, "greedy"), 5), behind=1, captured=True)
    llm.engine.budget = Scripted(3, 3, 3, 5, 5, 5)
    llm.generate(prompts(1), replace(GREEDY, max_tokens=40, max_draft_tokens=1))
    assert {record.nodes for record in llm.engine.stats.recent} >= {3, 5}


def test_a_plan_reaches_as_far_as_all_that_is_ahead_could_take_its_sequences() -> None:
    llm = tiny_llm(Oracle(recorded(1, "greedy"), 3), behind=2, captured=True)
    llm.add(Prompt(None, prompts(1)[0]), replace(GREEDY, max_tokens=20))
    while len(llm.engine._in_flight) < 2 or llm.engine._in_flight[-1].plan.starts != [None]:
        llm.engine.step()
    plan, (sequence,) = llm.engine._in_flight[-1].plan, llm.engine.scheduler.running
    assert len(sequence.ahead) == 2 and sequence.ahead[-1] == 1 + 3
    assert plan.reaches() == [len(sequence.tokens) + sum(sequence.ahead) - 1 + 1 + 3]


def test_a_plan_is_kept_while_the_same_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is another when somebody comes or leaves, or when fewer drafts fit."""
    launched: list[tuple[Plan, list[Any], int]] = []
    real = Plan.of

    def made(planned: list[Any], budget: int = 0, before: Plan | None = None) -> Plan:
        launched.append((real(planned, budget, before), list(planned), budget))
        return launched[-1][0]

    monkeypatch.setattr(Plan, "of", made)
    for drafter in (None, Oracle(recorded(3, "greedy"), 2)):
        launched.clear()
        llm = tiny_llm(drafter, behind=1, captured=True)
        ends = [replace(GREEDY, max_tokens=most) for most in (12, 12, 6)]
        assert said(llm, ends) == [text[: one.max_tokens] for text, one in zip(plain(3, "greedy"), ends)]
        kept = [after[0] is before[0] for before, after in itertools.pairwise(launched)]
        alike = [after[1:] == before[1:] for before, after in itertools.pairwise(launched)]
        assert sum(kept) >= (6 if drafter is None else 1) and all(same for one, same in zip(kept, alike) if one)
        assert len({id(plan) for plan, _, _ in launched}) >= 3
