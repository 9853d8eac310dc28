"""A budget from measured costs: in simulated rounds it comes near the best fixed number, and it never changes the text.

Nothing here looks at a clock: what rounds take is a table, who accepts what is drawn from a seed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline import Eagle, NGram, Suffix
from paceline.engine.budget import BUDGETS, Budget, Costs, FixedBudget, Load, MeasuredBudget, make_budget
from paceline.engine.luck import Luck, NodeLuck
from paceline.engine.replaying import ReplayingRunner
from paceline.engine.round import Plan
from paceline.engine.sizes import find_size, usual_sizes
from paceline.engine.stats import EngineStats, RoundRecord
from paceline.errors import OptionError
from paceline.models.batch import Work
from paceline.models.frame import Size
from tests.drafters.tiny_eagle import tiny_eagle
from tests.fakes import tiny_llm

# Milliseconds of rounds by sequences and nodes, about as on a GPU with a small model.
TABLE = {
    1: {0: 0.80, 1: 0.92, 2: 1.00, 3: 1.05, 5: 1.25},
    16: {0: 0.90, 1: 1.08, 2: 1.20, 3: 1.30, 5: 1.60},
    64: {0: 1.25, 1: 1.50, 2: 1.70, 3: 1.90, 5: 2.40},
    256: {0: 2.70, 1: 3.70, 2: 4.60, 3: 5.50, 5: 7.40},
}
COSTS: Costs = {(size, nodes): 1e-3 * ms for size, row in TABLE.items() for nodes, ms in row.items()}
TOLD: Costs = {key: 0.9 * seconds - 5e-5 for key, seconds in COSTS.items()}  # with nobody in them they take less
Shares = tuple[float, ...]  # how often a draft comes true whose forerunners did, by position
HEAD: Shares = (0.70, 0.55 / 0.70, 0.45 / 0.55, 0.35 / 0.45, 0.28 / 0.35)
FADING: Shares = (0.70, 0.55, 0.45, 0.35, 0.28)
POOR: Shares = (0.30, 0.30, 0.30, 0.30, 0.30)
NEVER: Shares = (0.0,) * 5


def expected(shares: Shares, nodes: int) -> float:
    tokens = survival = 1.0
    for share in shares[:nodes]:
        survival *= share
        tokens += survival
    return tokens


@dataclass
class Life:
    """Rounds that a budget chooses, and learns of one round late. What they bring is what is to be expected."""

    budget: Budget
    running: int
    costs: Costs = field(default_factory=lambda: COSTS)
    history: EngineStats = field(default_factory=EngineStats)
    chooser: random.Random = field(default_factory=lambda: random.Random(7))
    flying: deque[RoundRecord] = field(default_factory=deque)

    def live(self, rounds: int, shares: Shares) -> tuple[float, Counter[int]]:
        """Tokens a second, and how often each number was chosen."""
        tokens = seconds = 0.0
        chosen: Counter[int] = Counter()
        for _ in range(rounds):
            nodes = self.budget.choose(self.running, self.history)
            chosen[nodes] += 1
            spent = self.costs[self.running, nodes]
            tokens, seconds = tokens + self.running * expected(shares, nodes), seconds + spent
            self.flying.append(self.record(nodes, shares, spent))
            if len(self.flying) > 1:
                self.history.add(self.flying.popleft())
        return tokens / seconds, chosen

    def record(self, nodes: int, shares: Shares, seconds: float) -> RoundRecord:
        met = tuple([list(range(self.accepted(nodes, shares))) for _ in range(self.running)])
        total = sum(map(len, met))
        counts = nodes * self.running, total, total + self.running
        seconds *= self.chooser.choice((0.99, 1.0, 1.01)) if self.chooser.random() < 0.99 else 5.0
        return RoundRecord(self.running * (1 + nodes), self.running, 0, *counts, 0.0, seconds, 0.0, nodes, met)

    def accepted(self, nodes: int, shares: Shares) -> int:
        draw = self.chooser.random
        return next((depth for depth, share in enumerate(shares[:nodes]) if draw() >= share), min(nodes, len(shares)))


def measured(told: bool = False, max_nodes: int = 5, nested: bool = False) -> MeasuredBudget:
    budget = MeasuredBudget(max_nodes, True, NodeLuck(max_nodes) if nested else None)
    if told:
        budget.tell(TOLD)
    return budget


@pytest.mark.parametrize(("told", "nested"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shares", [HEAD, FADING, POOR, NEVER], ids=["head", "fading", "poor", "never"])
@pytest.mark.parametrize(("running", "rounds"), [(1, 1000), (16, 500), (64, 250), (256, 250)])
def test_it_is_near_the_best_fixed_number_and_never_much_slower_than_plain(
    running: int, rounds: int, shares: Shares, told: bool, nested: bool
) -> None:
    """A chain is a nested tree too."""
    rates = {nodes: running * expected(shares, nodes) / COSTS[running, nodes] for nodes in TABLE[running]}
    found, chosen = Life(measured(told, nested=nested), running).live(rounds, shares)
    assert found > 0.95 * max(rates.values()), chosen
    assert found > rates[0] / 1.03, chosen


@pytest.mark.parametrize("running", [1, 16, 64])
def test_no_round_is_spent_on_trying_where_rounds_were_timed_before(running: int) -> None:
    best = max(expected(HEAD, nodes) / COSTS[running, nodes] for nodes in TABLE[running])
    rate, chosen = Life(measured(told=True), running).live(60, HEAD)
    assert rate > 0.95 * running * best and not chosen[0]


@pytest.mark.parametrize(("running", "soon"), [(1, 80), (16, 40), (256, 20)])
def test_luck_that_leaves_is_noticed_soon_and_luck_that_returns_within_some_hundred_rounds(
    running: int, soon: int
) -> None:
    plain = list[int]()  # rounds without drafts after it has returned
    for seed in range(5):
        life = Life(measured(), running, chooser=random.Random(seed))
        life.live(150, HEAD)
        life.live(soon, NEVER)
        assert life.live(200, NEVER)[1][0] > 185
        plain.append(life.live(400, HEAD)[1][0])
        assert life.live(100, HEAD)[1][0] <= 4
    assert max(plain) < 300


def test_what_brings_little_is_looked_at_the_more_rarely_the_more_that_costs() -> None:
    budget, costs = measured(), {(1, nodes): 1e-3 * (1 if nodes in (0, 5) else 5) for nodes in TABLE[1]}
    budget.tell(costs)
    life, lucky = Life(budget, 1, costs), (0.99,) * 5  # plain brings a sixth of the best, and others no more
    assert life.live(300, lucky)[1] == {5: 300}
    assert 0 < life.live(700, lucky)[1][0] <= 8


def test_a_look_at_plain_that_costs_too_much_as_yet_holds_up_nobody_elses() -> None:
    load, rates, looked = Load(1), {0: 1.0, 7: 8.0, 31: 7.2}, Counter[int]()
    for nodes in rates:
        for _ in range(4):
            load.spend(nodes, 1.0)
    for number in range(2000):
        load.pass_round()
        if load.left < 0:
            load.decide(rates)
            looked[load.arm] += 1
            assert load.arm == 7 or number > 60
            assert number > 200 or (load.arm != 0 and (number < 100 or looked[31]))
    assert looked[0] >= 2 and looked[31] >= 4


def test_a_look_that_costs_more_than_was_thought_is_paid_before_the_next() -> None:
    """A drafter on the host that has prompts to read first: what its rounds usually take does not say so."""

    def looks(reading: float) -> int:
        """In so many rounds at which drafts bring nothing; each first of a look reads for so long."""
        budget, history, looked, before = measured(), EngineStats(), 0, 0
        budget.tell({(8, nodes): 1e-3 * (1 + nodes / 10) for nodes in budget.arms})
        for number in range(6000):
            nodes = budget.choose(8, history)
            seconds = 1e-3 * (1 + nodes / 10) + (reading if nodes and not before else 0.0)
            met = tuple([[] for _ in range(8)])
            history.add(RoundRecord(8 * (1 + nodes), 8, 0, 8 * nodes, 0, 8, 0.0, seconds, 0.0, nodes, met))
            looked += bool(nodes and not before and number > 100)
            before = nodes
        return looked

    assert looks(0.0) > 10
    assert 1 <= looks(20e-3) <= 4, "twenty rounds are 1% of two thousand"
    assert 1 <= looks(200e-3) <= 2, "but nobody waits for ever for what was one pause"


def test_acceptance_that_one_load_taught_serves_all() -> None:
    """What nothing is accepted of is not tried anew for each number of sequences."""
    budget, history = measured(told=True), EngineStats()
    Life(budget, 64, history=history).live(60, NEVER)
    for running in (1, 16, 256):
        assert Life(budget, running, history=history).live(40, NEVER)[1] == {0: 40}


def test_each_number_of_sequences_has_its_own() -> None:
    budget, history = measured(), EngineStats()
    for _ in range(4):
        alone, many = (Life(budget, size, history=history).live(50, POOR)[1] for size in (1, 256))
    assert alone[0] < 10 and many[0] > 40


def test_what_nobody_has_measured_lies_between_its_neighbours_and_one_more_is_tried_if_it_could_win() -> None:
    budget, history = MeasuredBudget(16), EngineStats()
    assert budget.arms == [0, 1, 2, 3, 5, 7, 16] and MeasuredBudget(25).arms[-3:] == [7, 15, 25]
    budget.tell({(4, 0): 1.0, (16, 0): 4.0, (4, 1): 1.1, (4, 3): 1.5, (16, 3): 9.0, (64, 6): 1.0})
    assert budget._seconds(budget._load(4)) == pytest.approx({0: 1.0, 1: 1.1, 2: 1.3, 3: 1.5, 5: 1.5})
    assert budget._seconds(budget._load(7)) == pytest.approx(
        {0: 2.0, 1: 3.0, 2: 3.5, 3: 4.0, 5: 4.0} | {1: 2 + 2 / 3, 2: 2 + 4 / 3}
    )
    assert budget._seconds(budget._load(17)) == {0: 1.0}, "nothing is known: plain comes first"
    climbed = MeasuredBudget(16)
    costs = {(1, nodes): 1.0 + nodes**2 for nodes in climbed.arms}
    chosen = Life(climbed, 1, costs, history).live(400, (0.9,) * 16)[1]
    assert max(chosen) == 2, "what costs too much is not climbed beyond"


def test_what_was_told_is_corrected_by_what_the_latest_round_took() -> None:
    for took, wanted in ((4.0, 6.0), (1.5, 2.5)):
        load = Load(16, {3: 3.0, 5: 5.0})
        load.spend(3, took)
        assert load.known() == {3: 3.0, 5: 5.0}, "one round is none"
        load.spend(3, took)
        assert load.known() == pytest.approx({3: took, 5: wanted}), "more by so much, less in proportion"


def test_what_a_drafter_on_the_host_takes_says_nothing_of_rounds_without_it() -> None:
    """As they were timed on the device all seem to take the same; those with drafts wait for the host."""
    load = Load(8, {0: 1.0, 3: 1.1, 7: 1.2}, ahead=0)
    for _ in range(2):
        load.spend(7, 3.2)
    assert load.known() == pytest.approx({0: 1.0, 3: 3.1, 7: 3.2})
    budget = MeasuredBudget(16, ahead=0)
    budget.tell({(8, nodes): 1e-3 * (1 + nodes / 100) for nodes in budget.arms})
    costs = {(8, nodes): 1e-3 * (2.5 if nodes else 1.05) for nodes in budget.arms}
    rate, chosen = Life(budget, 8, costs).live(200, POOR)
    assert rate > 0.95 * 8 / 1.05e-3 and chosen[0] > 180, chosen


def test_rounds_that_say_nothing_of_drafting_are_not_counted() -> None:
    """Prompt chunks cost what they cost; a first round in which something is made is one of many."""
    budget, history = measured(), EngineStats()
    life = Life(budget, 1, history=history)
    for _ in range(100):
        life.live(2, FADING)
        history.add(RoundRecord(99, 1, 0, 0, 0, 1, 0.0, 900.0, 0.0, None, ([],)))
    assert life.live(100, FADING)[1].most_common(1)[0][0] in (2, 3)


def test_rounds_before_its_first_choice_were_those_of_another_drafter() -> None:
    history = EngineStats()
    Life(FixedBudget(3), 1, history=history).live(200, NEVER)
    assert Life(measured(told=True), 1, history=history).live(1, HEAD)[1] == {3: 1}


def test_what_drafting_takes_counts_where_nothing_overlaps() -> None:
    for ahead, best in ((-1, 0), (0, 0), (5, 5)):
        budget, history, chosen = MeasuredBudget(5, ahead), EngineStats(), Counter[int]()
        for _ in range(300):
            nodes = budget.choose(1, history)
            chosen[nodes] += 1
            history.add(
                RoundRecord(1 + nodes, 1, 0, nodes, nodes, 1 + nodes, 20.0 * nodes, 5.0, 0.0, nodes, ([*range(nodes)],))
            )
        assert chosen.most_common(1)[0][0] == best


def test_what_is_learned_of_a_drafter_follows_from_what_it_says_of_its_trees() -> None:
    def luck(config: Any) -> Luck | NodeLuck:
        budget = make_budget("measured", config.create(), -1)
        assert isinstance(budget, MeasuredBudget)
        return budget._luck

    head = tiny_eagle("third")
    assert isinstance(luck(Eagle(head, 8, tree="static")), NodeLuck)
    assert isinstance(luck(Eagle(head, 8, tree="dynamic")), NodeLuck)
    trees, chains = luck(Suffix(tree=True)), luck(Eagle(head, 8))
    assert isinstance(trees, Luck) and trees._own is not None and isinstance(chains, Luck) and chains._own is None
    assert make_budget("measured", None, -1) == FixedBudget(0)
    assert make_budget("fixed", NGram(3).create(), 3) == FixedBudget(3)


def met(*lengths: int) -> list[list[int]]:
    """So many drafts of a chain were accepted, by sequence."""
    return [list(range(length)) for length in lengths]


def test_of_nested_trees_every_round_tells_what_fewer_nodes_would_have_brought() -> None:
    luck = NodeLuck(8)
    assert luck.tokens(3) == pytest.approx(1 + 0.7 + 0.7 * 0.85 + 0.7 * 0.85**2), "a guess"
    for _ in range(40):
        luck.rounds += 1
        luck.learn(5, [[0, 1, 4], [0], [2], [], [0, 3]])
    assert [luck.tokens(nodes) for nodes in range(6)] == pytest.approx([1.0, 1.6, 1.8, 2.0, 2.2, 2.4], abs=0.05)
    behind = luck.tokens(5) - luck.tokens(4)
    assert luck.tokens(7) - luck.tokens(5) == pytest.approx((0.85 + 0.85**2) * behind), "as likely, or nearly so"
    luck.learn(2, [[0, 1]] * 1000)
    assert luck.tokens(2) > 2.5 and luck.tokens(5) - luck.tokens(2) == pytest.approx(0.6, abs=0.1)
    luck.rounds += 5000
    assert luck.tokens(3) == pytest.approx(1 + 0.7 + 0.7 * 0.85 + 0.7 * 0.85**2), "long ago: a guess again"


def test_a_tree_brings_what_it_brought_itself_and_a_chain_what_longer_ones_tell() -> None:
    for trees, small in ((False, 1 + 0.8 * 3), (True, 1.5)):
        luck = Luck(8, trees)
        for _ in range(40):
            luck.rounds += 1
            luck.learn(8, met(5, 5, 5, 5, 0))
        assert luck.tokens(3) == pytest.approx(3.4, abs=0.1), "a guess: as far as the large one came"
        assert luck.tokens(8) == pytest.approx(5.0, abs=0.2)
        for _ in range(8):
            luck.rounds += 1
            luck.learn(3, met(1, 0, 1, 0, 0, 1) if trees else met(3, 3, 3, 3, 0))
        assert luck.tokens(3) == pytest.approx(small, abs=0.1)
        assert luck.tokens(8) == pytest.approx(5.0, abs=0.2), "which says nothing of the large one"
        luck.rounds += 2000
        assert not trees or luck.tokens(3) != pytest.approx(small, abs=0.1), "long ago: a guess again"


def test_where_a_small_tree_ends_says_nothing_of_larger_ones() -> None:
    tree, chain = Luck(8, trees=True), Luck(8, trees=False)
    for luck in (tree, chain):
        luck.learn(3, met(2) * 40)
    assert tree.tokens(3) == 3.0 and tree.tokens(8) > 5.0
    assert chain.tokens(3) == pytest.approx(chain.tokens(8), abs=0.2), "a third draft was there, and was wrong"


def test_the_same_records_give_the_same_answers() -> None:
    lives = [Life(measured(), 4, {(4, nodes): 1.0 + 0.1 * nodes for nodes in TABLE[1]}) for _ in range(2)]
    assert lives[0].live(300, FADING) == lives[1].live(300, FADING)
    assert list(lives[0].history.recent) == list(lives[1].history.recent)


@pytest.mark.parametrize("behind", [None, 1])
def test_the_text_is_the_same_and_rounds_say_what_they_were_allowed(behind: int | None) -> None:
    prompts = [[5, 6, 7, 8] * 6, [9, 9, 4] * 5]
    params = {"temperature": 0.7, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    plain = [one.outputs[0].token_ids for one in tiny_llm().generate(prompts, **params)]
    llm = tiny_llm(behind=behind)
    llm.engine.budget_kind = "measured"
    llm.set_drafter(NGram(4, min_match=1))
    assert isinstance(llm.engine.budget, MeasuredBudget) and llm.engine.budget.ahead == (-1 if behind is None else 4)
    assert [one.outputs[0].token_ids for one in llm.generate(prompts, **params)] == plain
    recent = llm.engine.stats.recent
    assert {record.nodes for record in recent} >= {None, 0, 1}, "prompts, drafts and none were there"
    assert all(sum(map(len, record.met)) == record.accepted for record in recent)
    assert all(len(record.met) == record.sequences for record in recent if record.nodes and not behind)


def test_what_rounds_take_is_measured_before_the_first_request_where_they_are_captured() -> None:
    prompts, params = [[5, 6, 7, 8] * 4, [9, 9, 4] * 5], {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    plain = [one.outputs[0].token_ids for one in tiny_llm().generate(prompts, **params)]
    llm = tiny_llm(behind=1, captured=True, max_num_seqs=2, max_batched_tokens=8)
    llm.engine.budget_kind = "measured"
    llm.set_drafter(NGram(3, min_match=1))
    steps = list(llm.engine.warm_up())
    budget = llm.engine.budget
    assert isinstance(budget, MeasuredBudget) and isinstance(llm.engine.runner, ReplayingRunner)
    told = {(size, nodes): seconds for size in (1, 2) for nodes, seconds in budget._load(size).told.items()}
    assert told.keys() == {(size, nodes) for size in (1, 2) for nodes in (0, 1, 2, 3)} and min(told.values()) > 0
    assert len(steps) == len(llm.engine.runner.captured), "all that were asked for were captured, each once"
    assert [one.outputs[0].token_ids for one in llm.generate(prompts, **params)] == plain, "and nothing is left of it"


def test_rounds_between_none_and_all_nodes_are_captured_where_a_budget_may_choose_them() -> None:
    def of(*arms: int) -> set[tuple[int, int]]:
        return {(size.sampling, size.nodes) for size in usual_sizes(16, 32, 8, arms) if not size.chunks}

    assert {nodes for _, nodes in of()} == {0, 8}
    assert of(0, 3, 8) - of() == {(1, 3), (2, 3), (4, 3), (8, 3)}, "16 sequences of 4 rows are too many for 32"


def test_a_number_of_nodes_that_a_budget_chooses_needs_no_captures_of_its_own_beside_prompts() -> None:
    for nodes, wanted in ((0, 0), (1, 5), (3, 5), (5, 5)):
        work = [Work(0, 40, 1, nodes), Work(1, 0, 20, 0)]
        assert find_size(Plan([], work, int(nodes > 0), 1, nodes), 5) == Size(32, 8, 1, wanted)
        assert find_size(Plan([], work[:1], int(nodes > 0), 1, nodes), 5) == Size(1 + nodes, 1, 0, nodes)


def test_the_option_names_the_budget() -> None:
    for word, kind in (("auto", FixedBudget), ("fixed", FixedBudget), ("measured", MeasuredBudget)):
        assert isinstance(tiny_llm(NGram(), budget=word).engine.budget, kind)
    assert isinstance(tiny_llm(budget="measured").engine.budget, FixedBudget), "nobody drafts"
    with pytest.raises(OptionError, match=f"budget='most' is not known; allowed: {', '.join(BUDGETS)}"):
        tiny_llm(budget="most")
