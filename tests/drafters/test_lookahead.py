"""Lookahead against a plain statement of it: windows, n-grams and guesses in lists, the target asked path by path."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
import torch

from paceline import LLM, Lookahead, SamplingParams
from paceline.drafters.base import Context, Observation
from paceline.drafters.lookahead import LookaheadDrafter, merge, window_parents
from paceline.drafters.tree import ROOT, Proposal, paths
from paceline.errors import OptionError
from paceline.sampling.rules import RULES, Rule
from tests.fakes import tiny_llm, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[5, 9, 14, 3] * 3, [61, 7, 7, 20, 33], list(range(40, 60))]
Tree = list[tuple[int, ...]]  # each node as the tokens down to it


def place(level: int, column: int, width: int) -> int:
    """A node of the window by level and column; the newest token stands at level 0, column 0."""
    return level * width + column - 1


@pytest.mark.parametrize("ngram, width", [(4, 3), (3, 1), (5, 7), (3, 4)])
def test_the_window_s_rows_see_what_they_should(ngram: int, width: int) -> None:
    parents = window_parents(width, ngram)
    assert len(parents) == width * (ngram - 1) - 1
    ancestors = paths(torch.tensor([parents]))[0] if parents else []
    for level in range(ngram - 1):
        for column in range(width):
            if level == column == 0:
                continue
            row = [node for node in ancestors[place(level, column, width)].tolist() if node >= 0]
            above = {place(0, c, width) for c in range(1, column + 1)}
            above |= {place(lower, column, width) for lower in range(1, level + 1)}
            assert set(row) == above and len(row) == level + column, (level, column)  # so its position is P + l + c


def test_guesses_that_begin_alike_share_their_nodes() -> None:
    guesses = torch.tensor([[[1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3], [9, 9, 9]]])
    there = torch.tensor([[True, True, True, True, False]])
    tokens, parents, own = merge(guesses, there)
    nodes = own[0].nonzero()[:, 0].tolist()
    assert nodes == [0, 1, 2, 5, 6, 7, 8]
    assert [int(parents[0, node]) for node in nodes] == [ROOT, 0, 1, 1, ROOT, 6, 7]
    assert [int(tokens[0, node]) for node in nodes] == [1, 2, 3, 4, 5, 2, 3]


class Spied(LookaheadDrafter):
    """Keeps, by slot, each round's window, text and proposal, and the window's rows as the target computed them."""

    def __init__(self, config: Lookahead) -> None:
        super().__init__(config)
        self.rounds: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def propose(self, context: Context) -> Proposal:
        proposal = super().propose(context)
        for row, slot in enumerate(context.slots.tolist()):
            if slot == context.table.null:  # it does not draft
                continue
            size = int(proposal.sizes[row])
            text = context.table.tokens.tensor[slot, : int(context.lengths[row])].tolist()
            nodes = zip(*(part[row, :size].tolist() for part in (proposal.tokens, proposal.parents, proposal.scratch)))
            self.rounds[slot].append({"text": text, "window": self._window[slot].tolist(), "nodes": list(nodes)})
        return proposal

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        places, layout = seen.batch.places, seen.batch.layout
        for number, slot in enumerate(seen.batch.slots.tolist()[: places.num_sampling]):
            nodes = self.rounds[slot][-1]["nodes"] if self.rounds[slot] else []
            rows = places.sampled[places.index[number]][: 1 + len(nodes)]
            if len(nodes) and places.num_nodes:
                self.rounds[slot][-1]["positions"] = layout.positions[rows].tolist()


class SpiedConfig:
    def __init__(self, config: Lookahead) -> None:
        self.made = Spied(config)

    def create(self) -> Spied:
        return self.made


@torch.inference_mode()
def following(text: list[int]) -> int:
    """The target's choice, by transformers' own forward."""
    return int(tiny_model()(torch.tensor([text])).logits[0, -1].argmax())


class Plain:
    """The algorithm for one sequence, in lists."""

    def __init__(self, width: int, ngram: int, guesses: int, window: list[list[int]]) -> None:
        self.width, self.ngram, self.most = width, ngram, guesses
        self.window, self.rounds = [list(level) for level in window], 0
        self.pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)

    def guesses(self, newest: int) -> Tree:
        nodes: Tree = []
        for gram in reversed(self.pool[newest][-self.most :]):
            for length in range(1, len(gram) + 1):
                if gram[:length] not in nodes:
                    nodes.append(gram[:length])
        return nodes

    def move(self, text: list[int]) -> None:
        """After a forward over text and window."""
        first = [text[-1], *self.window[0][1:]]
        new = []
        for column in range(self.width):
            down = [level[column] for level in self.window[1:]]
            new.append(following([*text[:-1], *first[: column + 1], *down]))
        levels = [first, *self.window[1:], new]
        if self.rounds >= self.ngram - 2:
            for column in range(self.width):
                key, *rest = (level[column] for level in levels)
                found = self.pool[key]
                if tuple(rest) in found:
                    found.remove(tuple(rest))
                found.append(tuple(rest))
        self.window, self.rounds = levels[1:], self.rounds + 1


def as_paths(nodes: list[tuple[int, int, bool]]) -> Tree:
    down: Tree = []
    for token, parent, _ in nodes:
        down.append((*(() if parent < 0 else down[parent]), token))
    return down


@pytest.mark.parametrize("width, ngram, guesses", [(3, 4, 2), (5, 3, 4)])
@pytest.mark.parametrize("behind", [None, 0])
def test_windows_n_grams_and_guesses_are_those_of_the_plain_statement(
    width: int, ngram: int, guesses: int, behind: int | None
) -> None:
    """Three sequences together against each by itself, on shared tables and on tables of the device's own."""
    config = SpiedConfig(Lookahead(window=width, ngram=ngram, guesses=guesses))
    llm = tiny_llm(config, behind)
    llm.generate(PROMPTS, GREEDY)
    num_guessed = 0
    for rounds in config.made.rounds.values():
        plain = Plain(width, ngram, guesses, rounds[0]["window"])
        assert {token for level in rounds[0]["window"] for token in level} <= set(rounds[0]["text"])
        for round in rounds:
            assert [level[level is round["window"][0] :] for level in round["window"]] == [
                level[level is plain.window[0] :] for level in plain.window
            ]
            wanted, down = plain.guesses(round["text"][-1]), as_paths(round["nodes"])
            scratch = [node for node, (_, _, rides) in enumerate(round["nodes"]) if rides]
            real = [path for node, path in enumerate(down) if node not in scratch]
            assert real == wanted[: len(real)] and (len(real) == len(wanted) or not scratch)
            num_guessed += len(real)
            if not scratch:  # the budget at the end of the text had no room for the window
                continue
            assert len(scratch) == config.made.num_scratch == scratch[-1] - scratch[0] + 1
            if "positions" in round:
                base = len(round["text"]) - 1
                flat = [base + level + column for level in range(ngram - 1) for column in range(width)][1:]
                assert round["positions"][1 + scratch[0] : 2 + scratch[-1]] == flat
            plain.move(round["text"])
    assert num_guessed > 20


def test_what_a_text_repeats_is_guessed_and_accepted() -> None:
    llm = tiny_llm(Lookahead(window=5, ngram=4, guesses=4))
    plain = tiny_llm().generate(PROMPTS, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    stats = [one.outputs[0].stats for one in found]
    assert sum(sum(one.accepted) for one in stats) > 20
    assert max(len(one.proposed) for one in stats) == 3, "scratch nodes are nobody's proposal"


def test_a_small_budget_leaves_out_the_window_and_a_large_one_does_not() -> None:
    config = SpiedConfig(Lookahead(window=3, ngram=4, guesses=2))
    llm = tiny_llm(config)
    for most, rides in ((config.made.num_scratch - 1, False), (config.made.num_scratch, True)):
        config.made.rounds.clear()
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30, max_draft_tokens=most, ignore_eos=True))
        [rounds] = config.made.rounds.values()
        assert all(len(round["nodes"]) <= most for round in rounds)
        assert any(scratch for round in rounds for _, _, scratch in round["nodes"]) == rides


def test_a_slot_used_again_begins_afresh() -> None:
    def figures(llm: LLM, prompt: list[int]) -> tuple[list[int], list[int]]:
        stats = llm.generate([prompt], GREEDY)[0].outputs[0].stats
        return stats.proposed, stats.accepted

    llm = tiny_llm(Lookahead(window=5, ngram=3), max_num_seqs=1, prefix_caching=False)
    first = [figures(llm, prompt) for prompt in PROMPTS]
    assert [figures(llm, prompt) for prompt in PROMPTS] == first
    assert figures(tiny_llm(Lookahead(window=5, ngram=3)), PROMPTS[2]) == first[2]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"window": 0}, "window=0 is not allowed; allowed: a whole number, 1 or more"),
        ({"ngram": 2}, "ngram=2 is not allowed; allowed: a whole number, 3 or more"),
        ({"guesses": True}, "guesses=True is not allowed; allowed: a whole number, 1 or more"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 is not allowed; allowed: a whole number, 1 or more"),
        ({"num_draft_tokens": 5}, "num_draft_tokens=5 is not allowed; an n-gram of 5 tokens brings 4 at most"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        Lookahead(**options)
    assert str(caught.value) == said


def test_its_memory_is_counted_before_the_cache_is_sized() -> None:
    llm = tiny_llm(Lookahead(), max_num_seqs=3)
    drafter = llm.engine.drafter
    assert isinstance(drafter, LookaheadDrafter)
    held = [drafter._pool, drafter._age, drafter._marks, drafter._window]
    assert drafter.plan(llm.engine.target).bytes == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if not rule.chains_only], ids=lambda rule: rule.name)
def test_under_every_rule_for_trees_greedy_text_is_plain_and_no_window_row_is_accepted(rule: Rule) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=60)
    llm = tiny_llm(Lookahead(window=3, ngram=4, guesses=3), acceptance=rule.name)
    found = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    plain = [output.outputs[0].token_ids for output in tiny_llm().generate(PROMPTS, params)]
    assert [output.token_ids for output in found] == plain
    assert 0 < max(len(output.stats.accepted) for output in found) <= 3


def test_a_rule_that_judges_chains_refuses_it() -> None:
    with pytest.raises(OptionError, match="judges chains, but the drafter 'lookahead' proposes trees"):
        tiny_llm(Lookahead(), acceptance="block")
