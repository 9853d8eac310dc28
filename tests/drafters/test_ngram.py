"""N-gram drafting against plain statements of its three rules, written with lists."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.cache.slots import Slots
from paceline.drafters.base import Drafter
from paceline.drafters.ngram import NGram, NGramDrafter
from paceline.drafters.tree import PADDING, Proposal
from paceline.errors import OptionError

MAX_LEN = 40


class FakeContext:
    """What `propose` needs to see of the engine."""

    def __init__(self, table: Slots, slots: list[int], budgets: list[int], device: str = "cpu") -> None:
        self.table = table
        self.slot_list = slots
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        self.lengths = table.lengths[self.slots]
        self.budgets = torch.tensor(budgets, dtype=torch.int64, device=device)
        self.budget_list = budgets
        self.max_nodes = max(budgets, default=0)

    def draw(self, logits, parents, count=1, likeliest=False):
        raise AssertionError("a lookup draws nothing")

    def drawn(self, name, **options):
        raise AssertionError("a lookup draws nothing")


def fill(texts: list[list[int]], prompt_lengths: list[int] | None = None, apart: bool = False) -> Slots:
    table = Slots(len(texts), MAX_LEN, 1, torch.device("cpu"), apart=apart)
    table.tokens.host[:] = 1  # what earlier sequences left behind
    table.tokens.tensor[:] = 1
    for slot, text in enumerate(texts):
        table.begin(slot, text, len(text) if prompt_lengths is None else prompt_lengths[slot])
    table.flush()
    return table


def commit(table: Slots, slot: int, tokens: list[int]) -> None:
    """Where the tables are apart the host does not hear of it."""
    if table.apart:
        table.commit(torch.tensor([slot]), torch.tensor([tokens]), torch.tensor([len(tokens)]))
    else:
        table.append([slot], [tokens])


def chains(drafter: NGramDrafter, context: FakeContext) -> list[list[int]]:
    """What it proposes; where the host's search and the tensor search both can be asked, they agree."""
    nodes = min(drafter.max_nodes, context.max_nodes)
    said = read(drafter._look_up(context, nodes), context) if drafter._pace is None and nodes else None
    found = read(drafter.propose(context), context)
    assert said is None or said == found
    return found


def read(proposal: Proposal, context: FakeContext) -> list[list[int]]:
    sizes = proposal.sizes.tolist()
    assert proposal.chain and len(sizes) == len(context.slot_list)
    assert all(size <= budget for size, budget in zip(sizes, context.budgets.tolist()))
    for parents, size in zip(proposal.parents.tolist(), sizes):
        assert parents == list(range(-1, size - 1)) + [PADDING] * (proposal.num_nodes - size)
    return [row[:size] for row, size in zip(proposal.tokens.tolist(), sizes)]


def propose_one(config: NGram, text: list[int], prompt_length: int | None = None, budget: int = 99) -> list[int]:
    table = fill([text], None if prompt_length is None else [prompt_length])
    return chains(config.create(), FakeContext(table, [0], [budget]))[0]


# The rules, said plainly


def lookup(text: list[int], min_match: int, max_match: int, k: int) -> list[int]:
    """The vllm rule; with min_match 1, the transformers rule."""
    total = len(text)
    for n in range(min(max_match, total - 1), min_match - 1, -1):
        for j in range(total - n):
            if text[j : j + n] == text[total - n :]:
                return text[j + n : min(j + n + k, total)]
    return []


def lookup_with_reference(prompt: list[int], output: list[int], max_match: int, m: int) -> list[int]:
    past = [prompt[-1], *output]  # index 0 is the last prompt token, s the newest token
    s = len(output)
    for n in range(max_match, 0, -1):
        if n > s:
            continue
        needle = past[s + 1 - n : s + 1]
        for i in range(len(prompt) - n + 1):
            if prompt[i : i + n] == needle and prompt[i + n : i + n + m]:
                return prompt[i + n : i + n + m]
        for i in range(s - n + 1):
            copied = past[i + n : min(i + n + m, s)]
            if past[i : i + n] == needle and copied:
                return copied
    return []


# Known answers


@pytest.mark.parametrize(
    ("text", "n", "k", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 2, [6, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 3, []),
        ([7], 1, 3, []),
        ([7, 7], 1, 3, [7]),
    ],
)
def test_known_answers_of_the_vllm_rule(text, n, k, expected):
    assert propose_one(NGram(k, min_match=n, max_match=n), text) == expected
    assert lookup(text, n, n, k) == expected


def test_reference_prefers_the_prompt_and_never_leaves_it():
    #     prompt     | output            8 9 is in both; the prompt's continuation ends with the prompt
    text = [8, 9, 5, 6, 8, 9, 1, 2, 8, 9]
    assert propose_one(NGram(5, rule="reference"), text, prompt_length=4) == [5, 6]


def test_reference_finds_the_last_prompt_token_in_front_of_the_output():
    # prompt [3, 4], output [5, 6, 4, 5]: "4 5" stands across the border, where only the output's part may begin
    assert propose_one(NGram(5, rule="reference"), [3, 4, 5, 6, 4, 5], prompt_length=2) == [6, 4]


def test_reference_never_proposes_the_newest_token():
    assert propose_one(NGram(5, rule="reference"), [1, 2, 2], prompt_length=1) == []
    assert propose_one(NGram(5, rule="reference"), [1, 2, 2, 2], prompt_length=1) == [2]


def test_reference_has_nothing_to_look_up_before_the_first_output_token():
    assert propose_one(NGram(5, rule="reference"), [1, 1, 1, 1], prompt_length=4) == []


# Random texts


def random_case(rng: random.Random, batch: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Texts in small alphabets, some of the slots in any order, and budgets."""
    texts = []
    for _ in range(batch):
        alphabet = rng.randint(1, 5)
        texts.append([rng.randint(0, alphabet) for _ in range(rng.randint(1, MAX_LEN))])
    slots = rng.sample(range(batch), rng.randint(batch // 2, batch))
    highest = rng.choice([1, 3, 20])
    return texts, slots, [rng.randint(0, highest) for _ in slots]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rule", ["vllm", "transformers"])
def test_random_texts_agree_with_the_plain_statement(rule, apart):
    """Apart from the host the whole table is searched, whatever lies past the lengths."""
    rng, cases, proposed = random.Random(rule), 0, 0
    while cases < 6000:
        texts, slots, budgets = random_case(rng, batch=64)
        longest = rng.randint(1, 6)
        shortest = rng.randint(1, longest) if rule == "vllm" else 1
        config = NGram(rng.randint(1, 7), shortest, longest, rule)
        found = chains(config.create(), FakeContext(fill(texts, apart=apart), slots, budgets))
        for slot, budget, chain in zip(slots, budgets, found):
            k = min(config.num_draft_tokens, budget)
            expected = lookup(texts[slot], shortest, longest, k) if k else []
            assert chain == expected, (texts[slot], config, budget)
            cases, proposed = cases + 1, proposed + (len(expected) > 0)
    assert proposed > cases / 4


@pytest.mark.parametrize("apart", [False, True])
def test_random_rounds_of_the_reference_rule_agree_with_the_plain_statement(apart):
    rng, cases, counts_met = random.Random(0), 0, set()
    while cases < 6000:
        k, longest = rng.randint(1, 6), rng.randint(1, 5)
        texts = [[rng.randint(0, 3) for _ in range(rng.randint(1, 12))] for _ in range(32)]
        prompts = [len(text) - rng.randint(0, min(2, len(text) - 1)) for text in texts]
        table, drafter = fill(texts, prompts, apart), NGram(k, max_match=longest, rule="reference").create()
        m = [k] * len(texts)  # the plain statement's own count, moved after each round
        for _ in range(12):
            slots = rng.sample(range(32), rng.randint(8, 32))
            budgets = [rng.choice([0, 1, 2, 9, 9, 9]) for _ in slots]
            found = chains(drafter, FakeContext(table, slots, budgets))
            for slot, budget, chain in zip(slots, budgets, found):
                text, most = texts[slot], min(m[slot], budget)
                expected = lookup_with_reference(text[: prompts[slot]], text[prompts[slot] :], longest, most)
                assert chain == (expected if most else []), (text, prompts[slot], m[slot], budget)
                accepted = rng.choice([len(chain), rng.randint(0, len(chain))])
                committed = [*chain[:accepted], rng.randint(0, 3)][: MAX_LEN - len(text)]
                if len(committed) <= accepted:  # no room for another round
                    texts[slot], m[slot], prompts[slot] = [1, 2, 1], k, 1
                    drafter.forget([slot])
                    table.begin(slot, texts[slot], 1)
                    table.flush()
                    continue
                text.extend(committed)
                commit(table, slot, committed)
                if chain:
                    m[slot] = min(m[slot] + 2, k) if accepted == len(chain) else max(m[slot] - 1, 1)
                counts_met.add(m[slot])
                cases += 1
    assert counts_met == {1, 2, 3, 4, 5, 6}


# Odd batches


def test_a_budget_of_nothing_proposes_nothing():
    table = fill([[1, 1, 1], [2, 2, 2]])
    assert chains(NGram(3, 1).create(), FakeContext(table, [1, 0], [0, 0])) == [[], []]
    assert chains(NGram(3, 1).create(), FakeContext(table, [1, 0], [0, 1])) == [[], [1]]


@pytest.mark.parametrize("rule", ["vllm", "transformers", "reference"])
def test_an_empty_batch_is_fine(rule):
    table = fill([[1, 1, 1]])
    assert chains(NGram(3, rule=rule).create(), FakeContext(table, [], [])) == []


def test_a_match_longer_than_the_text_is_fine():
    assert propose_one(NGram(3, min_match=1, max_match=500), [4, 4, 4]) == [4]


def test_forgetting_before_the_first_proposal_is_fine():
    NGram(rule="reference").create().forget([0, 3])
    NGram().create().forget([0, 3])


def test_forgetting_restores_the_full_count():
    drafter, table = NGram(4, rule="reference").create(), fill([[1, 2, 3, 4, 5, 6, 1]], [6])
    assert chains(drafter, FakeContext(table, [0], [9])) == [[2, 3, 4, 5]]
    table.append([0], [[1]])  # all rejected
    assert chains(drafter, FakeContext(table, [0], [9])) == [[2, 3, 4]]
    drafter.forget([0])
    assert chains(drafter, FakeContext(table, [0], [9])) == [[2, 3, 4, 5]]


def test_a_reset_restores_every_count():
    drafter = NGram(4, rule="reference").create()
    drafter.reset()
    table = fill([[1, 2, 3, 4, 5, 6, 1], [1, 2, 3, 4, 5, 6, 2]], [6, 6])
    everyone = [0, 1], [9, 9]
    assert chains(drafter, FakeContext(table, *everyone)) == [[2, 3, 4, 5], [3, 4, 5, 6]]
    for slot in (0, 1):
        table.append([slot], [[slot + 1]])  # all rejected
    assert [len(chain) for chain in chains(drafter, FakeContext(table, *everyone))] == [3, 3]
    drafter.reset()
    assert [len(chain) for chain in chains(drafter, FakeContext(table, *everyone))] == [4, 4]


@pytest.mark.parametrize("rule", ["vllm", "transformers", "reference"])
def test_no_value_is_read_back_from_the_device(rule):
    """On the meta device there are shapes and no values: whatever waits for one fails."""
    drafter, table = NGram(4, rule=rule).create(), Slots(8, 100, 1, torch.device("meta"))
    context = FakeContext(table, [5, 0, 3], [4, 2, 9], device="meta")
    for _ in range(2):
        proposal = drafter.propose(context)
        assert proposal.tokens.shape == proposal.parents.shape == (3, 4)
        assert proposal.sizes.shape == (3,)
    drafter.forget([5])


# Options


def test_lengths_not_given_follow_each_rule():
    assert NGram().match_lengths == (2, 4)
    assert NGram(min_match=2).match_lengths == (2, 2)
    assert NGram(max_match=4).match_lengths == (4, 4)
    assert NGram(min_match=2, max_match=4).match_lengths == (2, 4)
    assert NGram(rule="transformers").match_lengths == (1, 2)
    assert NGram(rule="reference").match_lengths == (1, 3)
    assert NGram(rule="reference", max_match=7).match_lengths == (1, 7)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rule": "paddle"}, "rule='paddle' is not known; allowed: vllm, transformers, reference"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 is not allowed; allowed: a whole number, 1 or more"),
        ({"num_draft_tokens": None}, "num_draft_tokens=None is not allowed"),
        ({"min_match": 0}, "min_match=0 is not allowed"),
        ({"max_match": 2.0}, "max_match=2.0 is not allowed"),
        ({"max_match": True}, "max_match=True is not allowed"),
        ({"min_match": 4, "max_match": 3}, "min_match=4 is above max_match=3"),
        (
            {"min_match": 2, "rule": "transformers"},
            "min_match=2 is not allowed: rule 'transformers'",
        ),
    ],
)
def test_options_that_cannot_be_used_say_so(options, sentence):
    with pytest.raises(OptionError) as error:
        NGram(**options)
    assert sentence in str(error.value)


def test_it_is_a_drafter():
    drafter = NGram(num_draft_tokens=7).create()
    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.max_nodes, drafter.trees, drafter.on_device) == ("ngram", 7, False, True)
