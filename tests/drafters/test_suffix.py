"""The suffix drafter: what it takes in, what it keeps, what it proposes within a budget; with trees of both kinds."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.cache.slots import Slots
from paceline.drafters import suffix
from paceline.drafters.base import Drafter, Observation
from paceline.drafters.suffix import Suffix, SuffixDrafter
from paceline.drafters.suffix_tree import Limits
from paceline.errors import OptionError
from tests.drafters.runs import speculate
from tests.native import NATIVE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["python", NATIVE])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> suffix.Kind:
    """The trees of every drafter in these tests."""
    chosen = suffix.PYTHON if request.param == "python" else suffix.NATIVE
    monkeypatch.setattr(suffix, "kind_of_trees", lambda: chosen)
    return chosen


class FakeContext:
    """What `propose` needs to see of the engine."""

    def __init__(self, table: Slots, slots: list[int], budgets: list[int]) -> None:
        self.table = table
        self.slot_list = slots
        self.slots = torch.tensor(slots, dtype=torch.int64)
        self.lengths = table.lengths[self.slots]
        self.budgets = torch.tensor(budgets, dtype=torch.int64)
        self.budget_list = budgets
        self.max_nodes = max(budgets, default=0)

    def draw(self, logits, parents, count=1, likeliest=False):
        raise AssertionError("suffix decoding draws nothing")

    def drawn(self, name, **options):
        raise AssertionError("suffix decoding draws nothing")


def new_table() -> Slots:
    return Slots(6, 200, 1, CPU)


def observe(drafter: SuffixDrafter, table: Slots, slots: list[int]) -> None:
    """It looks at who was seen, and at the tables, and at nothing of the batch: there is none."""
    drafter.observe(Observation(table, None, None, slots))  # type: ignore[arg-type]


def drafts(drafter: SuffixDrafter, table: Slots, slots: list[int], budgets: list[int]):
    proposal = drafter.propose(FakeContext(table, slots, budgets))
    sizes = proposal.sizes.tolist()
    assert all(size <= budget for size, budget in zip(sizes, budgets))
    tokens, parents = proposal.tokens.tolist(), proposal.parents.tolist()
    return [(row[:size], above[:size]) for row, above, size in zip(tokens, parents, sizes)]


def test_it_continues_its_own_prompt():
    drafter, table = Suffix().create(), new_table()
    table.begin(2, [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 12)
    assert drafts(drafter, table, [2], [16]) == [([4, 5, 6], [-1, 0, 1])]
    assert drafts(drafter, table, [2], [2]) == [([4, 5], [-1, 0])]
    assert drafts(drafter, table, [2], [0]) == [([], [])]


def test_prompts_stay_out_of_what_others_see_and_responses_go_in():
    drafter, table = Suffix().create(), new_table()
    table.begin(0, [1, 2, 3, 4], 4)
    observe(drafter, table, [0])
    table.append([0], [[5, 6, 7, 8]])
    observe(drafter, table, [0])
    table.begin(1, [2, 3], 2)
    assert drafts(drafter, table, [1], [16]) == [([], [])], "slot 0's prompt is its own"
    table.begin(2, [9, 9, 5, 6], 4)
    assert drafts(drafter, table, [2], [16]) == [([7, 8], [-1, 0])]


def test_a_response_outlives_its_sequence_until_it_is_evicted():
    drafter, table = Suffix(max_cached_requests=2).create(), new_table()
    for request in range(3):
        slot = table.take()
        first = 10 * request
        table.begin(slot, [99, first + 1, first + 2, first + 3], 1)
        observe(drafter, table, [slot])
        drafter.forget([slot])
        table.give_back(slot)
    for request, expected in ((0, []), (1, [13]), (2, [23])):
        drafter.forget([0])
        table.begin(0, [7, 10 * request + 1, 10 * request + 2], 3)
        assert drafts(drafter, table, [0], [16])[0][0] == expected


def test_responses_are_dropped_by_bytes_the_oldest_first():
    drafter, table = Suffix(max_cached_bytes=2**14).create(), new_table()
    for request in range(40):
        table.begin(0, [9999, *range(1000 + 30 * request, 1030 + 30 * request)], 1)
        observe(drafter, table, [0])
        drafter.forget([0])
        assert drafter._responses is not None and drafter._responses.num_bytes <= 2**14
    for request, remembered in ((0, False), (20, False), (38, True), (39, True)):
        table.begin(0, [7, *range(1000 + 30 * request, 1016 + 30 * request)], 17)
        assert bool(drafts(drafter, table, [0], [16])[0][0]) == remembered
        drafter.forget([0])


@pytest.mark.parametrize("option", ["max_cached_requests", "max_cached_bytes"])
def test_without_a_cache_only_the_sequence_itself_is_seen(option):
    drafter, table = Suffix(**{option: 0}).create(), new_table()
    table.begin(0, [9, 1, 2, 3], 1)
    table.begin(1, [8, 1, 2], 3)
    observe(drafter, table, [0, 1])
    assert drafts(drafter, table, [1, 0], [16, 16]) == [([], []), ([], [])]


def test_a_forgotten_slot_starts_anew():
    drafter, table = Suffix().create(), new_table()
    table.begin(0, [1, 2, 3, 1, 2], 5)
    assert drafts(drafter, table, [0], [16])[0][0] == [3, 1]  # "1 2" stands twice, once followed by 3
    drafter.forget([0])
    table.begin(0, [5, 1, 2], 3)
    assert drafts(drafter, table, [0], [16]) == [([], [])]


def test_a_reset_forgets_every_sequence_and_keeps_what_was_said():
    drafter, table = Suffix().create(), new_table()
    table.begin(0, [1, 2, 3, 1, 2], 5)
    table.begin(1, [99, 5, 6, 7], 1)
    observe(drafter, table, [0, 1])
    drafter.reset()
    assert drafter._memories == {}
    table.begin(0, [8, 1, 2], 3)
    table.begin(1, [8, 5, 6], 3)
    assert drafts(drafter, table, [0, 1], [16, 16]) == [([], []), ([7], [-1])]


def test_of_equal_scores_its_own_tree_wins():
    drafter, table = Suffix(min_token_prob=0.0).create(), new_table()
    table.begin(0, [99, 1, 4, 1, 5], 1)  # others: after 1 comes 4 or 5, one half each
    table.begin(1, [1, 7, 1], 3)  # its own: after 1 came 7, once in two
    observe(drafter, table, [0])
    assert drafts(drafter, table, [1], [16])[0][0] == [7]


def test_others_win_with_a_better_score():
    drafter, table = Suffix().create(), new_table()
    table.begin(0, [99, 1, 4, 3, 1, 4], 1)  # after 1 always comes 4
    table.begin(1, [1, 7, 1], 3)
    observe(drafter, table, [0])
    assert drafts(drafter, table, [1], [16])[0][0] == [4]


def test_a_preempted_sequence_counts_once_more():
    drafter, table = Suffix().create(), new_table()
    table.begin(0, [9, 1, 2, 3], 1)
    observe(drafter, table, [0])
    drafter.forget([0])
    table.begin(3, [9, 1, 2, 3], 1)
    observe(drafter, table, [3])
    assert drafter._responses is not None
    assert drafter._responses.count([1, 2, 3]) == 0, "nobody has drafted yet"
    drafts(drafter, table, [3], [0])
    assert drafter._responses.count([1, 2, 3]) == 2


def test_nothing_is_read_before_something_is_drafted_and_then_not_all_in_one_round(kind, monkeypatch):
    """The least behind first: sequences that drafted the round before draft on."""
    monkeypatch.setattr(suffix, "kind_of_trees", lambda: kind._replace(read=40, read_each=0))
    drafter, table = Suffix().create(), new_table()
    texts = [[slot * 1000 + place for place in range(50)] for slot in range(4)]
    for slot in range(3):
        table.begin(slot, texts[slot], 5 if slot == 2 else 50)
        observe(drafter, table, [slot])
    assert not drafter._memories
    drafter.forget([2])  # the response of 45 tokens is put off

    def read() -> list[int]:
        known = [drafter._memories[slot].known if slot in drafter._memories else 0 for slot in (0, 1, 3)]
        return [*known, drafter._responses.count([])]

    table.begin(3, texts[3][:10], 10)
    found = []
    for _ in range(6):
        drafts(drafter, table, [0, 1, 3], [4, 4, 4])
        found.append(read())
    assert found == [[10, 0, 10, 20], [30, 0, 10, 40], [50, 15, 10, 45], [50, 50, 10, 45], *[[50, 50, 10, 45]] * 2]
    assert not drafter._late and not drafter._behind and drafter._num_late == 0
    assert drafter._responses.count(texts[2][5:29]) == 1 and drafter._responses.count(texts[2][20:44]) == 1


def test_what_is_put_off_keeps_within_the_limits_of_what_is_remembered():
    for limits, kept in (({"max_cached_requests": 3}, 3), ({"max_cached_bytes": 100}, 2)):
        drafter, table = Suffix(**limits).create(), new_table()
        for request in range(5):
            table.begin(0, [9, *range(10 * request, 10 * request + 10)], 1)
            observe(drafter, table, [0])
            drafter.forget([0])
        assert [late.tokens[0] for late in drafter._late] == [10 * request for request in range(5 - kept, 5)]
        assert drafter._num_late == 10 * kept


@pytest.mark.parametrize("branching", [False, True])
def test_random_rounds_agree_with_the_plain_statement(branching):
    rng, others_won, branched = random.Random(branching), 0, 0
    for _ in range(25):
        config = Suffix(rng.randint(1, 8), rng.randint(2, 8), rng.choice([1.0, 2.0]), 0.1, tree=branching)
        drafter, table = config.create(), new_table()
        texts = [[rng.randint(0, 3) for _ in range(rng.randint(1, 20))] for _ in range(6)]
        prompts = [len(text) for text in texts]
        for slot, text in enumerate(texts):
            table.begin(slot, text, len(text))
        told = [0] * 6  # how much of each sequence the drafter was shown
        for _ in range(12):
            seen = rng.sample(range(6), rng.randint(0, 6))
            observe(drafter, table, seen)
            slots = rng.sample(range(6), rng.randint(1, 6))
            budgets = [rng.randint(0, 9) for _ in slots]
            for slot in {*seen, *slots}:  # who is to draft is caught up with before anybody does
                told[slot] = len(texts[slot])
            expected = []
            for slot, budget in zip(slots, budgets):
                if budget == 0:
                    expected.append(([], []))
                    continue
                limits = Limits(min(budget, config.num_draft_tokens), config.max_spec_factor, 0.1, branching)
                own = speculate([texts[slot]], texts[slot], config.max_tree_depth, limits)
                responses = [text[n:shown] for text, n, shown in zip(texts, prompts, told)]
                others = speculate(responses, texts[slot], config.max_tree_depth, limits)
                best = own if own[2] >= others[2] else others
                expected.append(best[:2])
                others_won += best is others
                branched += best[1] != list(range(-1, len(best[1]) - 1))
            assert drafts(drafter, table, slots, budgets) == expected
            for slot, (tokens, _) in zip(slots, expected):
                committed = [*tokens[: rng.randint(0, 3)], rng.randint(0, 3)]
                table.append([slot], [committed])
                texts[slot] += committed
    assert others_won > 50
    assert (branched > 50) == branching


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 is not allowed; allowed: a whole number, 1 or more"),
        ({"max_tree_depth": 1}, "max_tree_depth=1 is not allowed; allowed: a whole number, 2 or more"),
        ({"max_cached_requests": -1}, "max_cached_requests=-1 is not allowed; allowed: a whole number, 0 or more"),
        ({"max_cached_bytes": 1.5}, "max_cached_bytes=1.5 is not allowed; allowed: a whole number, 0 or more"),
        ({"max_spec_factor": 0.0}, "max_spec_factor=0.0 is not allowed; allowed: a number above 0"),
        ({"max_spec_factor": float("nan")}, "max_spec_factor=nan is not allowed"),
        ({"min_token_prob": 1.5}, "min_token_prob=1.5 is not allowed; allowed: a number from 0 to 1"),
    ],
)
def test_options_that_cannot_be_used_say_so(options, sentence):
    with pytest.raises(OptionError) as error:
        Suffix(**options)
    assert sentence in str(error.value)


def test_a_drafter_that_stands_for_a_config_makes_fresh_ones():
    drafter, table = Suffix(tree=True).create(), new_table()
    table.begin(0, [1, 2, 3, 1, 2], 2)
    drafts(drafter, table, [0], [16])
    fresh = drafter.create()
    assert fresh.trees and not fresh._memories and fresh._responses.count([]) == 0
    assert drafter._responses.count([]) == 3


def test_it_is_a_drafter():
    drafter = Suffix(num_draft_tokens=7, tree=True).create()
    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.max_nodes, drafter.trees, drafter.on_device) == ("suffix", 7, True, False)
    assert not Suffix().create().trees
