"""The scheduler: its books in random runs, and what it promises case by case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.engine.round import Plan as Launch
from paceline.engine.scheduler import MustRead, Planned, Scheduler
from paceline.engine.sequence import Sequence
from tests.engine.simulation import MAX_LENGTH, SIZE, Plan, Simulation, make_sequence, run

SHAPES: Any = {
    "seed": st.integers(0, 2**32),
    "num_pages": st.integers(MAX_LENGTH // SIZE + 1, 14),
    "num_slots": st.integers(1, 5),
    "max_rows": st.sampled_from([1, 3, 8, 64]),
    "prefix_caching": st.booleans(),
    "max_nodes": st.integers(0, 6),
    "behind": st.integers(0, 2),
    "spread": st.sampled_from([0, 0, 1, 5]),
}
plans = st.builds(Plan, **SHAPES)
windows = st.builds(Plan, **SHAPES, width=st.integers(1, MAX_LENGTH - 1), more=st.integers(0, 6))


@given(plans)
@settings(max_examples=150, deadline=None)
def test_the_books_balance_after_every_operation_and_everybody_finishes(plan: Plan) -> None:
    check_run(plan)


@given(windows)
@settings(max_examples=250, deadline=None)
def test_under_windows_too_and_every_row_sees_its_own_text(plan: Plan) -> None:
    windowed = check_run(plan).slots.windowed
    assert windowed is not None and windowed.pool.num_available == plan.num_windowed and not windowed.held


def check_run(plan: Plan) -> Simulation:
    simulation = run(plan)
    assert all(sequence.finish_reason is not None for sequence in simulation.all), "a sequence never finished"
    for sequence in simulation.all:
        if sequence.finish_reason == "length":
            assert len(sequence.tokens) == sequence.max_length
    simulation.read_all()
    assert simulation.pool.num_available == plan.num_pages and simulation.slots.num_free == plan.num_slots
    simulation.check_arrival_order()
    assert simulation.most_ahead <= 1 + plan.behind
    return simulation


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_pages_under_windows_really_run_out_in_such_runs(behind: int) -> None:
    runs = [run(Plan(seed, 14, 5, 3, True, 4, behind, width=9)) for seed in range(50)]
    assert sum(simulation.preempted for simulation in runs) > 10
    assert sum(sequence.stats.prefix_hit > 0 for simulation in runs for sequence in simulation.all) > 50


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_small_pools_really_make_sequences_wait_again(behind: int) -> None:
    """The property above would say little if no run ever preempted, nor had to read first, nor read in vain."""
    runs = [run(Plan(seed, 7, 4, 64, True, 4, behind)) for seed in range(50)]
    assert sum(simulation.preempted for simulation in runs) > 30
    assert max(simulation.most_ahead for simulation in runs) == 1 + behind
    assert (sum(simulation.must_read for simulation in runs) > 30) == (behind > 0)
    assert (sum(simulation.void for simulation in runs) > 30) == (behind > 0)


def make_scheduler(num_pages: int, num_slots: int = 4, prefix_caching: bool = True) -> Scheduler:
    slots = Slots(num_slots, MAX_LENGTH, MAX_LENGTH // SIZE + 1, torch.device("cpu"), apart=True)
    return Scheduler(PagePool(num_pages, SIZE), slots, 64, prefix_caching)


def launch(scheduler: Scheduler, max_nodes: int = 0) -> list[Planned]:
    planned = scheduler.schedule(max_nodes)
    Launch.of(planned).launch()
    return planned


def read(scheduler: Scheduler, planned: list[Planned], new: list[int]) -> None:
    """The host reads a round in which every sequence that sampled got these tokens."""
    for sequence, work in planned:
        start = len(sequence.tokens) - 1 if work.start is None else work.start
        samples = sequence.ahead.pop(0) > 0
        if samples:
            sequence.tokens += new
            scheduler.slots.append([work.slot], [new])
        sequence.num_computed = start + work.count + (len(new) - 1 if samples else 0)
        if not sequence.ahead:
            sequence.num_launched = sequence.num_computed
        scheduler.publish(sequence)


def prefill(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Enter and compute the prompts, with one token sampled for each."""
    for sequence in sequences:
        scheduler.add(sequence)
    read(scheduler, launch(scheduler), [50])


def test_drafts_shrink_to_the_pages_held_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(4)
    first, second = make_sequence("a", [1] * 5, 20), make_sequence("b", [2] * 5, 20)
    prefill(scheduler, first, second)
    planned = scheduler.schedule(6)
    assert [(sequence.request_id, work.num_nodes) for sequence, work in planned] == [("a", 2), ("b", 2)]
    assert first.stats.preemptions == second.stats.preemptions == 0


def test_the_newest_sequence_gives_its_pages_back_first_and_waits_at_the_front() -> None:
    scheduler = make_scheduler(3, prefix_caching=False)
    old, young, late = (make_sequence(name, [1] * n, 20) for name, n in (("old", 4), ("young", 3), ("late", 9)))
    prefill(scheduler, old, young)
    scheduler.add(late)
    planned = launch(scheduler)
    assert [sequence.request_id for sequence, _ in planned] == ["old", "young"]
    read(scheduler, planned, [60] * 4)
    planned = scheduler.schedule(0)
    assert [sequence.request_id for sequence, _ in planned] == ["old"]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["young", "late"]
    assert young.stats.preemptions == 1 and young.tokens[:3] == [1] * 3 and young.num_output == 5


def test_a_waiting_sequence_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(4)
    prefill(scheduler, make_sequence("a", [1] * 7, 20))
    scheduler.add(make_sequence("big", [2] * 16, 20))
    scheduler.add(make_sequence("small", [3], 20))
    assert [sequence.request_id for sequence, _ in scheduler.schedule(0)] == ["a"]


@pytest.mark.parametrize("length, hit", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_prefix_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    scheduler = make_scheduler(12)
    first = make_sequence("a", list(range(10)), 20)
    prefill(scheduler, first)
    second = make_sequence("b", list(range(length)), 20)
    scheduler.add(second)
    work = {sequence.request_id: work for sequence, work in scheduler.schedule(0)}["b"]
    assert (work.start, work.count) == (hit, length - hit) and second.stats.prefix_hit == hit
    assert second.pages[: hit // SIZE] == first.pages[: hit // SIZE]


def test_samples_wait_for_the_first_and_then_share_its_prompt_pages() -> None:
    scheduler = make_scheduler(12)
    leader = make_sequence("0", [1] * 9, 20)
    followers = [make_sequence(str(n), [1] * 9, 20, leader) for n in (1, 2)]
    for sequence in (leader, *followers):
        scheduler.add(sequence)
    first = launch(scheduler)
    assert [sequence.request_id for sequence, _ in first] == ["0"]
    second = launch(scheduler)
    assert [(sequence.request_id, work.start) for sequence, work in second] == [("0", None)], "nothing is read yet"
    read(scheduler, first, [5])
    planned = launch(scheduler)
    assert [(sequence.request_id, work.start) for sequence, work in planned] == [("0", None), ("1", 8), ("2", 8)]
    assert all(sequence.pages[:2] == leader.pages[:2] for sequence in followers)


def test_samples_start_behind_the_newest_of_the_first_when_nothing_is_ahead() -> None:
    scheduler = make_scheduler(12)
    leader = make_sequence("0", [1] * 9, 20)
    followers = [make_sequence(str(n), [1] * 9, 20, leader) for n in (1, 2)]
    prefill(scheduler, leader, *followers)
    planned = launch(scheduler)
    assert [(sequence.request_id, work.start) for sequence, work in planned] == [("0", 9), ("1", 8), ("2", 8)]
    assert all(sequence.pages[:2] == leader.pages[:2] for sequence in followers)


# Rounds ahead.


def test_scheduling_marks_nothing_and_may_be_asked_again() -> None:
    scheduler = make_scheduler(12)
    sequence = make_sequence("a", [1] * 6, 20)
    scheduler.add(sequence)
    first = scheduler.schedule(0)
    assert sequence.ahead == [] and sequence.num_launched == 0
    again = scheduler.schedule(0)
    assert [work for _, work in first] == [work for _, work in again]


def test_a_sequence_with_a_round_ahead_goes_on_from_wherever_the_device_stands() -> None:
    scheduler = make_scheduler(12)
    sequence = make_sequence("a", [1] * 6, 24)
    prefill(scheduler, sequence)
    rounds = [launch(scheduler, 3) for _ in range(3)]
    works = [work for ((_, work),) in rounds]
    slot = sequence.slot
    assert works == [(slot, 6, 1, 3), (slot, None, 1, 3), (slot, None, 1, 3)]
    assert works[1] is works[2], "what stays the same is not made again"
    assert sequence.ahead == [4, 4, 4] and sequence.outlook()[1] == 19 and len(sequence.pages) == -(-18 // SIZE)
    read(scheduler, rounds[0], [60])
    assert sequence.ahead == [4, 4] and sequence.outlook()[:2] == (None, 16)
    read(scheduler, rounds[1], [60])
    read(scheduler, rounds[2], [60] * 4)
    assert sequence.outlook()[:2] == (12, 13)


def test_prompt_chunks_follow_each_other_without_being_read() -> None:
    scheduler = make_scheduler(12)
    scheduler.max_batched_tokens = 5
    sequence = make_sequence("a", list(range(13)), 20)
    scheduler.add(sequence)
    rounds = [launch(scheduler) for _ in range(4)]
    works = [work for ((_, work),) in rounds]
    assert [(work.start, work.count) for work in works] == [(0, 5), (5, 5), (10, 3), (None, 1)]
    assert sequence.ahead == [0, 0, 1, 1] and sequence.num_computed == 0 and not sequence.keys
    for number, planned in enumerate(rounds):
        read(scheduler, planned, [60])
        assert sequence.num_computed == (5, 10, 13, 14)[number] and len(sequence.keys) == (1, 2, 3, 3)[number]


def test_a_sequence_that_what_is_ahead_will_surely_end_gets_no_further_round() -> None:
    scheduler = make_scheduler(12)
    sequence = make_sequence("a", [1] * 6, 9)
    prefill(scheduler, sequence)
    assert [len(launch(scheduler)) for _ in range(3)] == [1, 1, 0]
    assert sequence.outlook() == (None, 9, 0)


def test_drafts_leave_room_for_what_the_rounds_ahead_bring_at_least() -> None:
    scheduler = make_scheduler(12)
    sequence = make_sequence("a", [1] * 6, 12)
    prefill(scheduler, sequence)
    nodes = [work.num_nodes for _ in range(5) for _, work in launch(scheduler, 9)]
    assert nodes == [4, 3, 2, 1, 0] and sequence.outlook()[1] == 12
    assert len(sequence.pages) * SIZE == 12, "no page beyond the limit"


def test_while_rounds_are_in_flight_nobody_is_preempted_before_they_have_been_read() -> None:
    scheduler = make_scheduler(4, prefix_caching=False)
    old, young = make_sequence("old", [1] * 6, 20), make_sequence("young", [2] * 6, 20)
    prefill(scheduler, old, young)
    rounds = [launch(scheduler), launch(scheduler)]
    held = [list(old.pages), list(young.pages)]
    with pytest.raises(MustRead):
        scheduler.schedule(0)
    assert [old.pages, young.pages] == held and old.ahead == young.ahead == [1, 1] and not scheduler.num_preemptions
    for planned in rounds:
        read(scheduler, planned, [60])
    assert [sequence.request_id for sequence, _ in launch(scheduler)] == ["old"]
    assert scheduler.num_preemptions == 1 and list(scheduler.waiting) == [young]


def test_a_sequence_may_not_leave_while_a_round_may_still_write_to_its_pages() -> None:
    scheduler = make_scheduler(4)
    sequence = make_sequence("a", [1] * 5, 20)
    scheduler.add(sequence)
    planned = launch(scheduler)
    sequence.finish_reason = "abort"
    with pytest.raises(AssertionError, match="a round in flight"):
        scheduler.leave(sequence)
    assert scheduler.schedule(0) == [], "it is not scheduled again"
    read(scheduler, planned, [60])
    scheduler.leave(sequence)
    assert scheduler.pool.num_available == 4 and scheduler.slots.num_free == 4


def test_after_a_reset_all_wait_in_their_order_and_say_nothing_of_what_was_in_flight() -> None:
    scheduler = make_scheduler(12, num_slots=2)
    sequences = [make_sequence(name, [number] * 5, 20) for number, name in enumerate("abcd")]
    prefill(scheduler, *sequences)
    launch(scheduler)
    sequences[1].finish_reason = "abort"
    scheduler.reset()
    assert [sequence.request_id for sequence in scheduler.waiting] == ["a", "c", "d"] and not scheduler.running
    assert scheduler.pool.num_available == 12 and scheduler.slots.num_free == 2
    scheduler.pool.check()
    assert sequences[0].tokens == [0] * 5 + [50] and not sequences[0].ahead
    planned = launch(scheduler)
    assert [(sequence.request_id, work.start, work.count) for sequence, work in planned] == [("a", 0, 6), ("c", 0, 5)]
