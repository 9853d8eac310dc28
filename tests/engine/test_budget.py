"""A budget from measured costs: with made-up ones it finds the best number of nodes, and it never changes the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from paceline import NGram
from paceline.engine.budget import BUDGETS, FixedBudget, MeasuredBudget
from paceline.engine.stats import EngineStats, RoundRecord
from paceline.errors import OptionError
from tests.fakes import tiny_llm

Cost = Callable[[int, int], float]


def chain(acceptance: float, nodes: int) -> float:
    """Tokens of a round: what comes true of a chain, and one more."""
    return sum(acceptance**depth for depth in range(nodes + 1))


def record(running: int, nodes: int | None, tokens: float, seconds: float, draft: float = 0.0) -> RoundRecord:
    proposed = 0 if nodes is None else nodes * running
    emitted = round(running * tokens * 1000)  # in thousandths, so that an average can be given
    return RoundRecord(running * (1 + (nodes or 0)), running, 0, proposed, 0, emitted, draft, seconds, 0.0, nodes)


def live(
    budget: MeasuredBudget, history: EngineStats, rounds: int, running: int, cost: Cost, luck: float
) -> Counter[int]:
    """So many rounds; how often each number was chosen."""
    chosen: Counter[int] = Counter()
    for _ in range(rounds):
        nodes = budget.choose(running, history)
        chosen[nodes] += 1
        history.add(record(running, nodes, chain(luck, nodes), cost(running, nodes)))
    return chosen


def on_a_gpu(running: int, nodes: int) -> float:
    """Rows are free up to 64, and then each costs."""
    return 5.0 + 0.1 * nodes + max(0, running * (1 + nodes) - 64) * 0.1


@pytest.mark.parametrize(
    ("running", "luck", "best"),
    [(1, 0.7, 7), (16, 0.7, 2), (256, 0.7, 0), (1, 0.0, 0), (32, 0.999, 1)],
)
def test_the_number_that_brings_most_tokens_a_second_is_found(running: int, luck: float, best: int) -> None:
    budget, history = MeasuredBudget(7), EngineStats()
    rates = {nodes: chain(luck, nodes) / on_a_gpu(running, nodes) for nodes in budget.arms}
    assert max(rates, key=lambda nodes: rates[nodes]) == best, "the example is what it says"
    live(budget, history, 100, running, on_a_gpu, luck)
    settled = live(budget, history, 1000, running, on_a_gpu, luck)
    assert settled[best] > 970, "others are tried rarely"
    settled = live(budget, history, 6000, running, on_a_gpu, luck)
    assert 5900 < settled[best] < 6000, "but they are"


def test_each_number_of_sequences_has_its_own() -> None:
    budget, history = MeasuredBudget(7), EngineStats()
    for _ in range(5):
        alone, many = (live(budget, history, 60, running, on_a_gpu, 0.7) for running in (1, 256))
    assert alone.most_common(1)[0][0] == 7 and many.most_common(1)[0][0] == 0


def test_a_drafter_that_becomes_worse_is_left_and_one_that_becomes_better_found_again() -> None:
    budget, history = MeasuredBudget(7), EngineStats()
    assert live(budget, history, 300, 1, on_a_gpu, 0.8).most_common(1)[0][0] == 7
    live(budget, history, 200, 1, on_a_gpu, 0.0)
    assert live(budget, history, 300, 1, on_a_gpu, 0.0).most_common(1)[0][0] == 0
    live(budget, history, 8000, 1, on_a_gpu, 0.9)
    assert live(budget, history, 300, 1, on_a_gpu, 0.9).most_common(1)[0][0] == 7


def test_rounds_that_say_nothing_of_drafting_are_not_counted() -> None:
    """Prompt chunks cost what they cost; a first round in which something is made is one of many."""
    budget, history = MeasuredBudget(7), EngineStats()
    for number in range(400):
        nodes = budget.choose(1, history)
        if number % 3 == 0:
            history.add(record(1, None, 1.0, 900.0))
        slow = 500.0 if number in (1, 50, 100) else 0.0
        history.add(record(1, nodes, chain(0.7, nodes), on_a_gpu(1, nodes) + slow))
    assert live(budget, history, 100, 1, on_a_gpu, 0.7).most_common(1)[0][0] == 7


def test_what_drafting_takes_counts_where_nothing_overlaps() -> None:
    for ahead, best in ((-1, 0), (0, 0), (7, 7)):
        budget, history, chosen = MeasuredBudget(7, ahead), EngineStats(), Counter[int]()
        for _ in range(300):
            nodes = budget.choose(1, history)
            chosen[nodes] += 1
            history.add(record(1, nodes, chain(0.7, nodes), 5.0, draft=20.0 * bool(nodes)))
        assert chosen.most_common(1)[0][0] == best


def test_the_same_records_give_the_same_answers() -> None:
    histories = [EngineStats(), EngineStats()]
    asked = [live(MeasuredBudget(5), history, 500, 4, on_a_gpu, 0.6) for history in histories]
    assert asked[0] == asked[1] and list(histories[0].recent) == list(histories[1].recent)


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
    allowed = Counter(record.nodes for record in llm.engine.stats.recent)
    assert set(allowed) >= {None, 4, 0}, "prompts, drafts and none were there"


def test_the_option_names_the_budget() -> None:
    for word, kind in (("auto", FixedBudget), ("fixed", FixedBudget), ("measured", MeasuredBudget)):
        assert isinstance(tiny_llm(NGram(), budget=word).engine.budget, kind)
    assert isinstance(tiny_llm(budget="measured").engine.budget, FixedBudget), "nobody drafts"
    with pytest.raises(OptionError, match=f"budget='most' is not known; allowed: {', '.join(BUDGETS)}"):
        tiny_llm(budget="most")
