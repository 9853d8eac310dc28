"""The first drafter with something to say drafts; what several said for one batch becomes one proposal."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, FirstOf, NGram, SamplingParams, Suffix
from paceline.drafters.base import FINAL, Context, Observation, QuietDrafter, Taps
from paceline.drafters.first_of import FirstOfDrafter, merge
from paceline.drafters.tree import PADDING, Proposal
from tests.drafters.contract import DRAFTERS
from tests.fakes import VOCAB, Oracle, tiny_llm, tiny_model

CPU = torch.device("cpu")
PROMPTS = [[(7 * i + n) % VOCAB for i in range(8 + n)] for n in range(3)]


class Told(QuietDrafter):
    """Proposes what it was told for each prompt, and counts how often it was asked."""

    def __init__(self, name: str, said: dict[int, tuple[list[int], list[int]]], max_nodes: int = 4) -> None:
        self.name, self.said, self.max_nodes = name, said, max_nodes
        self.asked: list[list[int]] = []
        self.budgets: list[list[int]] = []
        self.trees = any(parents != list(range(-1, len(parents) - 1)) for _, parents in said.values())

    def create(self) -> Told:
        return self

    def propose(self, context: Context) -> Proposal:
        prompts = [context.table.prompt_length(slot) for slot in context.slot_list]
        self.asked.append(prompts)
        self.budgets.append(context.budgets.tolist())
        return Proposal.of_trees([self.said.get(length, ([], [])) for length in prompts], CPU, self.name)


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[Any]:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **params})
    return [result.outputs[0] for result in llm.generate(prompts, given)]


@functools.cache
def recorded() -> dict[tuple[int, ...], list[int]]:
    outputs = generate(tiny_llm(), max_tokens=14)
    return {tuple(prompt): [*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs)}


def texts(count: int = 10) -> list[list[int]]:
    return [recorded()[tuple(prompt)][len(prompt) :][:count] for prompt in PROMPTS]


def test_later_drafters_are_asked_only_for_those_the_earlier_left_empty() -> None:
    first = Told("first", {8: ([1], [-1])})
    second = Told("second", {8: ([2], [-1]), 9: ([3, 4], [-1, 0])})
    third = Told("third", {})
    llm = tiny_llm(FirstOf(first, second, third))
    assert [output.token_ids for output in generate(llm, max_tokens=4)] == texts(4)
    assert first.asked[0] == [8, 9, 10] and second.asked[0] == [9, 10] and third.asked[0] == [10]


def test_each_drafters_proposals_are_counted_apart() -> None:
    first, second = Told("first", {8: ([1, 2, 3], [-1, 0, 1])}), Told("second", {9: ([3, 4], [-1, 0])})
    llm = tiny_llm(FirstOf(first, second))
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "first then second"
    outputs = generate(llm)
    assert [list(output.stats.proposed_by) for output in outputs] == [["first"], ["second"], []]
    assert [list(output.stats.proposed_by.values()) for output in outputs[:2]] == [
        [output.stats.proposed] for output in outputs[:2]
    ]
    llm.set_drafter(first)
    assert generate(llm)[0].stats.proposed_by == {}  # there is one drafter, and `proposed` is its


def test_nobody_further_is_asked_when_all_have_something() -> None:
    everything = {length: ([1], [-1]) for length in (8, 9, 10)}
    second = Told("second", everything)
    generate(tiny_llm(FirstOf(Told("first", everything), second)), max_tokens=4)
    assert second.asked == []


def test_budgets_are_cut_to_what_each_drafter_can() -> None:
    first, second = Told("first", {}, max_nodes=2), Told("second", {}, max_nodes=5)
    made = FirstOfDrafter([first, second])
    assert made.max_nodes == 5
    generate(tiny_llm(FirstOf(first, second)), PROMPTS[:1], max_tokens=12)
    assert first.budgets[0] == [2] and second.budgets[0] == [5]


class Named(Oracle):
    """An oracle under another name that speaks for one prompt only."""

    def __init__(self, name: str, prompt: list[int], count: int) -> None:
        super().__init__(recorded(), count)
        self.name, self.prompt = name, prompt

    def propose(self, context: Context) -> Proposal:
        mine = [context.table.prompt_length(slot) == len(self.prompt) for slot in context.slot_list]
        proposal = super().propose(context)
        return proposal.cut(torch.where(torch.tensor(mine), proposal.sizes, 0))


def accepted_names(outputs: list[Any]) -> list[set[str | None]]:
    return [{told.drafter for told in output.provenance if told.kind == "accepted"} for output in outputs]


@pytest.mark.parametrize("behind", [None, 0, 1, 2])
def test_provenance_names_the_drafter_that_gave_each_token(behind: int | None) -> None:
    """Rounds ahead, all are asked and the first answer stands: nobody on the host could say who is left."""
    drafter = FirstOf(Named("left", PROMPTS[0], 2), Named("right", PROMPTS[1], 3))
    outputs = generate(tiny_llm(drafter, behind=behind))
    assert [output.token_ids for output in outputs] == texts()
    assert accepted_names(outputs) == [{"left"}, {"right"}, set()]
    assert [len(output.stats.proposed) for output in outputs] == [2, 3, 0]


@pytest.mark.parametrize("behind", [None, 0, 1, 2])
def test_the_first_with_an_answer_keeps_it_when_several_have_one(behind: int | None) -> None:
    late = FirstOf(Named("right", PROMPTS[1], 1), Oracle(recorded(), 3))
    outputs = generate(tiny_llm(FirstOf(Named("left", PROMPTS[0], 2), late), behind=behind))
    assert [output.token_ids for output in outputs] == texts()
    assert accepted_names(outputs) == [{"left"}, {"right"}, {"oracle"}]
    assert [len(output.stats.proposed) for output in outputs] == [2, 1, 3]


@pytest.mark.parametrize("behind", [None, 1])
def test_nested_composition_keeps_the_names(behind: int | None) -> None:
    parts = [Named(name, prompt, 2) for name, prompt in zip("abc", PROMPTS)]
    outputs = generate(tiny_llm(FirstOf(parts[0], FirstOf(parts[1], parts[2])), behind=behind))
    assert [output.token_ids for output in outputs] == texts()
    assert accepted_names(outputs) == [{"a"}, {"b"}, {"c"}]


def tree(tokens: list[int], parents: list[int], name: str) -> Proposal:
    return Proposal.of_trees([(tokens, parents)], CPU, name)


def test_trees_and_chains_of_different_sizes_become_one_proposal() -> None:
    several = Proposal.of_trees([([], []), ([5, 6, 7], [-1, -1, 0]), ([], [])], CPU, "tree")
    rest = Proposal.of_trees([([8, 9], [-1, 0]), ([], [])], CPU, "chain")
    merged = merge([([0, 1, 2], several), ([0, 2], rest)], 3, CPU)
    assert merged.tokens.tolist()[0][:2] == [8, 9] and merged.tokens.tolist()[1] == [5, 6, 7]
    assert merged.parents.tolist() == [[-1, 0, PADDING], [-1, -1, 0], [PADDING] * 3]
    assert merged.sizes.tolist() == [2, 3, 0] and not merged.chain and merged.probs is None
    assert merged.names == ("tree", "chain") and merged.origins is not None
    assert [merged.names[i] for i in merged.origins[0, :2]] == ["chain", "chain"]
    assert [merged.names[i] for i in merged.origins[1]] == ["tree"] * 3


def test_only_chains_stay_a_chain_and_empty_answers_do_no_harm() -> None:
    merged = merge(
        [([0, 1], Proposal.empty(2, CPU)), ([0, 1], Proposal.of_trees([([4], [-1]), ([], [])], CPU, "x"))], 2, CPU
    )
    assert merged.chain and merged.sizes.tolist() == [1, 0] and merged.names == ("x",)
    nothing = merge([([0], Proposal.empty(1, CPU))], 1, CPU)
    assert nothing.num_nodes == 0 and nothing.sizes.tolist() == [0]


def test_chosen_tokens_beside_drawn_ones_are_point_masses() -> None:
    chain = Proposal.of_chains(torch.tensor([[1, 2]]), torch.tensor([2]), "drawn")
    drawn = dataclasses.replace(chain, probs=torch.rand(1, 2, 5))
    merged = merge([([1], tree([3, 4, 0], [-1, 0, -1], "chosen")), ([0], drawn)], 2, CPU)
    assert merged.probs is not None and drawn.probs is not None
    assert torch.equal(merged.probs[0, :2], drawn.probs[0])
    assert torch.equal(merged.probs[1], torch.nn.functional.one_hot(torch.tensor([3, 4, 0]), 5).float())


def test_scratch_marks_survive_beside_a_drafter_that_has_none() -> None:
    marked = tree([3, 4], [-1, -1], "a")
    marked.scratch = torch.tensor([[True, False]])
    merged = merge([([1], marked), ([0], tree([5], [-1], "b"))], 2, CPU)
    assert merged.scratch is not None and merged.scratch.tolist() == [[False, False], [True, False]]


class Tapped(QuietDrafter):
    """Keeps the states it is shown."""

    max_nodes = 1

    def __init__(self, name: str, *hidden: int) -> None:
        self.name, self.taps, self.states = name, Taps(hidden=hidden), []  # type: ignore[var-annotated]

    def create(self) -> Tapped:
        return self

    def propose(self, context: Context) -> Proposal:
        return Proposal.empty(len(context.slot_list), CPU)

    def observe(self, seen: Observation) -> None:
        self.states.append((seen.states, seen.before))


def test_each_drafter_is_shown_the_states_it_tapped_in_its_own_order() -> None:
    parts = ("a", FINAL, 1), ("b", 1), ("c",)
    alone, together = ([Tapped(name, *hidden) for name, *hidden in parts] for _ in range(2))
    for drafters in (*([drafter] for drafter in alone), together):
        llm = tiny_llm(FirstOf(*drafters) if len(drafters) > 1 else drafters[0], block_size=4)
        for _ in range(2):  # the second time after a prefix hit, with the states in front of it
            generate(llm, PROMPTS[:2], max_tokens=3)
    for one, other in zip(alone, together):
        assert len(one.states) == len(other.states) == 6
        assert sum(before is not None for _, before in one.states) == bool(one.taps.hidden)
        for (states, before), (expected, wanted) in zip(other.states, one.states):
            assert (states is None) == (expected is None) == (not one.taps.hidden)
            assert states is None or torch.equal(states, expected)
            assert (before is None) == (wanted is None)
            if before is not None:
                assert torch.equal(before.states, wanted.states) and bool(before.known.all())
                assert torch.equal(before.known, wanted.known) and torch.equal(before.positions, wanted.positions)


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_lookup_before_an_equal_draft_model_under_each_rule(acceptance: str, temperature: float) -> None:
    """One batch mixes copied and drawn proposals: whatever the equal draft model drew is accepted."""
    composed = FirstOf(NGram(3, max_match=2), DraftModel(tiny_model(), 3))
    llm = tiny_llm(composed, acceptance=acceptance, block_size=4)
    prompts = [[4, 5, 6, 7, 4, 5], *PROMPTS[:2]]
    outputs = generate(llm, prompts, temperature=temperature, seed=6, max_tokens=20)
    if acceptance == "exact" or temperature == 0:
        plain = generate(tiny_llm(), prompts, temperature=temperature, seed=6, max_tokens=20)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    names = {told.drafter for output in outputs for told in output.provenance}
    assert "draft_model" in names
    for output in outputs:
        rounds = [[t for t in output.provenance if t.round == r] for r in range(output.stats.rounds)]
        drawn = [items for items in rounds if items[0].drafter == "draft_model"]
        assert all(items[-1].kind == "bonus" for items in drawn[:-1]), "an equal draft model was refused"


def test_it_is_made_of_configs_words_and_names() -> None:
    made = FirstOf("suffix", NGram(7)).create()
    assert [drafter.name for drafter in made.drafters] == ["suffix", "ngram"]
    assert made.name == "suffix then ngram" and made.max_nodes >= 7 and not made.on_device
    assert generate(tiny_llm(FirstOf(Suffix(), "ngram")), max_tokens=6)[0].token_ids == texts(6)[0]


def test_each_part_sees_the_columns_it_tapped_whatever_their_widths() -> None:
    """The state after the last norm may be narrower than the residual."""
    parts = [Tapped("one", FINAL), Tapped("two", 1, FINAL), Tapped("three", 2)]
    drafter = FirstOfDrafter(parts)
    assert drafter.taps.hidden == (FINAL, 1, 2)
    drafter._widths = [2, 3, 4]
    states = torch.arange(18).view(2, 9)
    assert [drafter._part(states, part)[0].tolist() for part in parts] == [[0, 1], [2, 3, 4, 0, 1], [5, 6, 7, 8]]


@pytest.mark.parametrize("behind", [None, 1])
def test_a_chain_is_not_asked_for_the_last_token_where_a_tree_has_room(behind: int | None) -> None:
    llm = tiny_llm(FirstOf(DRAFTERS["pard"]({}), Suffix(tree=True)), behind)
    assert [output.token_ids for output in generate(llm)] == texts()
