"""The scheduler with made-up sequences: random arrivals, lengths, aborts and samples, page pools far too small.

A round here is committed as the engine does it, but the target is a random number: how many nodes it accepts. Rounds
may be committed one round late. After every operation the whole of the books is checked.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.pages import PagePool, page_key
from paceline.cache.slots import Slots
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.scheduler import Planned, Scheduler
from paceline.engine.sequence import Sequence
from paceline.params import SamplingParams
from paceline.sampling.state import Words

SIZE = 4  # positions a page
MAX_LENGTH = 24


def make_sequence(name: str, prompt: list[int], max_length: int, leader: Sequence | None = None) -> Sequence:
    silent = Detokenizer(None, prompt, (), include_stop=False, skip_special=True)
    return Sequence(
        name, 0, list(prompt), len(prompt), SamplingParams(), 0, Words([], []), silent, max_length, leader=leader
    )


@dataclass
class Plan:
    """What one run does, drawn by hypothesis; everything else follows from the seed."""

    seed: int
    num_pages: int
    num_slots: int
    max_rows: int
    prefix_caching: bool
    max_nodes: int
    late: int


plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    num_pages=st.integers(MAX_LENGTH // SIZE + 1, 14),
    num_slots=st.integers(1, 5),
    max_rows=st.sampled_from([1, 3, 8, 64]),
    prefix_caching=st.booleans(),
    max_nodes=st.integers(0, 6),
    late=st.integers(0, 1),
)


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.pool = PagePool(plan.num_pages, SIZE)
        self.slots = Slots(plan.num_slots, MAX_LENGTH, MAX_LENGTH // SIZE + 1, torch.device("cpu"))
        self.scheduler = Scheduler(self.pool, self.slots, plan.max_rows, plan.prefix_caching)
        self.scheduler.on_enter = self.entered
        self.all: list[Sequence] = []
        self.in_flight: deque[list[Planned]] = deque()
        self.order: list[str] = []  # first admissions
        self.preempted = 0
        self._preempt = self.scheduler._preempt
        self.scheduler._preempt = self.preempt  # type: ignore[method-assign]

    def entered(self, sequence: Sequence) -> None:
        if sequence.request_id not in self.order:
            self.order.append(sequence.request_id)

    def arrive(self) -> None:
        """A request; its prompt shares a beginning with others, and it may want several samples."""
        length = self.random.randint(1, MAX_LENGTH - 2)
        prompt = [7] * length if self.random.random() < 0.6 else [self.random.randrange(97) for _ in range(length)]
        most = self.random.randint(length + 1, MAX_LENGTH)
        leader: Sequence | None = None
        for _ in range(self.random.choice([1, 1, 1, 3])):
            sequence = make_sequence(str(len(self.all)), prompt, most, leader)
            leader = leader or sequence
            self.all.append(sequence)
            self.scheduler.add(sequence)

    def abort(self) -> None:
        alive = [sequence for sequence in self.all if sequence.finish_reason is None]
        if alive:
            sequence = self.random.choice(alive)
            sequence.finish_reason, sequence.aborted = "abort", True
            if not sequence.in_flight:
                self.scheduler.leave(sequence)

    def launch(self) -> bool:
        flying = {id(sequence) for round_ in self.in_flight for sequence, _ in round_}
        fitting: dict[str, int] = {}  # nodes each may have with the pages that are there when it is asked

        def limit(sequence: Sequence) -> int:
            nodes = min(self.plan.max_nodes, max(0, sequence.room - 1))
            missing = -(-(sequence.num_computed + 1 + nodes) // SIZE) - len(sequence.pages)
            held = len(sequence.pages) * SIZE - sequence.num_computed - 1
            fits = missing <= self.pool.num_available
            fitting[sequence.request_id] = nodes if fits else max(0, min(nodes, held))
            return nodes

        planned = self.scheduler.schedule(limit)
        assert len({id(sequence) for sequence, _ in planned}) == len(planned), "somebody is scheduled twice"
        for sequence, work in planned:
            assert id(sequence) not in flying, "a sequence in flight was scheduled again"
            assert work.slot == sequence.slot and work.start == sequence.num_computed and work.count >= 1
            assert work.start + work.count <= len(sequence.tokens)
            assert len(sequence.pages) * SIZE >= work.start + work.count + work.num_nodes, "pages do not cover the work"
            assert work.num_nodes == fitting.get(sequence.request_id, 0), "drafts as long as pages allow, not longer"
            assert work.num_nodes == 0 or sequence.num_left == work.count == 1, "only decoding sequences draft"
        rows = sum(work.count + work.num_nodes for sequence, work in planned if sequence.request_id in fitting)
        chunks = sum(work.count for sequence, work in planned if sequence.request_id not in fitting)
        assert chunks <= max(self.plan.max_rows - rows, min(SIZE, self.plan.max_rows))
        if planned:
            self.in_flight.append(planned)
        return bool(planned)

    def preempt(self, sequence: Sequence) -> None:
        assert self.pool.num_available == 0, "somebody was preempted while there were pages"
        assert sequence is [other for other in self.scheduler.running if not other.in_flight][-1], "not the newest"
        self.preempted += 1
        self._preempt(sequence)

    def commit(self) -> None:
        for sequence, work in self.in_flight.popleft():
            sequence.in_flight = False
            if sequence.aborted:
                self.scheduler.leave(sequence)
                continue
            accepted = 0
            if work.start + work.count == len(sequence.tokens):
                accepted = self.random.randint(0, work.num_nodes)
                new = [self.random.choice([7, 8]) for _ in range(accepted + 1)]
                sequence.tokens += new
                self.slots.append(work.slot, new)
            sequence.num_computed = work.start + work.count + accepted
            assert len(sequence.tokens) <= sequence.max_length
            self.scheduler.publish(sequence)
            if sequence.room == 0:
                sequence.finish_reason = "length"
                self.scheduler.leave(sequence)

    def check(self) -> None:
        """Every page, slot and reference is where the books say."""
        self.pool.check()
        running = self.scheduler.running
        holders = Counter(page for sequence in running for page in sequence.pages)
        assert [self.pool.refs(page) for page in range(self.pool.num_pages)] == [
            holders[page] for page in range(self.pool.num_pages)
        ]
        slots = [sequence.slot for sequence in running]
        assert None not in slots and len(set(slots)) == len(slots)
        assert self.slots.num_free == self.plan.num_slots - len(slots)
        assert not {id(s) for s in running} & {id(s) for s in self.scheduler.waiting}
        for sequence in running:
            full = sequence.num_computed // SIZE
            for number, page in enumerate(sequence.pages):
                if holders[page] > 1:
                    assert number < full, "a page that is not full and computed is shared"
                    assert self.pool.lookup(sequence.keys[number]) == page, "a page is shared but not published"
            assert self.slots.tokens.host[sequence.slot, : len(sequence.tokens)].tolist() == sequence.tokens
            assert self.slots.pages.host[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages
            key = b""
            for number in range(len(sequence.keys)):
                key = page_key(key, sequence.tokens[number * SIZE : (number + 1) * SIZE])
                assert sequence.keys[number] == key
        for sequence in self.scheduler.waiting:
            assert sequence.slot is None and not sequence.pages and sequence.num_computed == 0

    def check_arrival_order(self) -> None:
        """First admissions follow arrival, except that samples wait for the first of them."""
        leaders = [int(name) for name in self.order if self.all[int(name)].leader is None]
        assert leaders == sorted(leaders), "somebody overtook"
        place = {name: number for number, name in enumerate(self.order)}
        for sequence in self.all:
            leader = sequence.leader
            if leader is not None and sequence.request_id in place and leader.request_id in place:
                assert place[leader.request_id] < place[sequence.request_id]


def run(plan: Plan) -> Simulation:
    simulation = Simulation(plan)
    chance = simulation.random
    for _ in range(25):
        action = chance.random()
        if action < 0.3:
            simulation.arrive()
        elif action < 0.38:
            simulation.abort()
        simulation.check()
        step(simulation)
    for _ in range(2000):
        if not simulation.scheduler.waiting and not simulation.scheduler.running:
            break
        step(simulation)
    return simulation


def step(simulation: Simulation) -> None:
    launched = simulation.launch()
    simulation.check()
    while len(simulation.in_flight) > (simulation.plan.late if launched else 0):
        simulation.commit()
        simulation.check()


@given(plans)
@settings(max_examples=120, deadline=None)
def test_the_books_balance_after_every_operation_and_everybody_finishes(plan: Plan) -> None:
    simulation = run(plan)
    assert all(sequence.finish_reason is not None for sequence in simulation.all), "a sequence never finished"
    for sequence in simulation.all:
        if sequence.finish_reason == "length":
            assert len(sequence.tokens) == sequence.max_length
    assert simulation.pool.num_available == plan.num_pages and simulation.slots.num_free == plan.num_slots
    simulation.check_arrival_order()


def test_small_pools_really_make_sequences_wait_again() -> None:
    """The property above would say little if no run ever preempted."""
    total = sum(run(Plan(seed, 7, 4, 64, True, 4, seed % 2)).preempted for seed in range(30))
    assert total > 30


def make_scheduler(num_pages: int, num_slots: int = 4, prefix_caching: bool = True) -> Scheduler:
    slots = Slots(num_slots, MAX_LENGTH, MAX_LENGTH // SIZE + 1, torch.device("cpu"))
    return Scheduler(PagePool(num_pages, SIZE), slots, 64, prefix_caching)


def prefill(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Enter and compute the prompts, with one token sampled for each."""
    for sequence in sequences:
        scheduler.add(sequence)
    for sequence, work in scheduler.schedule(lambda _: 0):
        sequence.in_flight, sequence.num_computed = False, work.start + work.count
        sequence.tokens.append(50)
        scheduler.slots.append(work.slot, [50])
        scheduler.publish(sequence)


def test_drafts_shrink_to_the_pages_held_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(4)
    first, second = make_sequence("a", [1] * 5, 20), make_sequence("b", [2] * 5, 20)
    prefill(scheduler, first, second)
    planned = scheduler.schedule(lambda _: 6)
    assert [(sequence.request_id, work.num_nodes) for sequence, work in planned] == [("a", 2), ("b", 2)]
    assert first.stats.preemptions == second.stats.preemptions == 0


def test_the_newest_sequence_gives_its_pages_back_first_and_waits_at_the_front() -> None:
    scheduler = make_scheduler(3, prefix_caching=False)
    old, young, late = (make_sequence(name, [1] * n, 20) for name, n in (("old", 4), ("young", 3), ("late", 9)))
    prefill(scheduler, old, young)
    scheduler.add(late)
    assert [sequence.request_id for sequence, _ in scheduler.schedule(lambda _: 0)] == ["old", "young"]
    for sequence in (old, young):
        sequence.in_flight, sequence.num_computed = False, sequence.num_computed + 4
        sequence.tokens += [60] * 4
        scheduler.slots.append(sequence.slot or 0, [60] * 4)
    planned = scheduler.schedule(lambda _: 0)
    assert [sequence.request_id for sequence, _ in planned] == ["old"]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["young", "late"]
    assert young.stats.preemptions == 1 and young.tokens[:3] == [1] * 3 and young.num_output == 5


def test_a_waiting_sequence_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(4)
    prefill(scheduler, make_sequence("a", [1] * 7, 20))
    scheduler.add(make_sequence("big", [2] * 16, 20))
    scheduler.add(make_sequence("small", [3], 20))
    assert [sequence.request_id for sequence, _ in scheduler.schedule(lambda _: 0)] == ["a"]


@pytest.mark.parametrize("length, hit", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_prefix_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    scheduler = make_scheduler(12)
    first = make_sequence("a", list(range(10)), 20)
    prefill(scheduler, first)
    second = make_sequence("b", list(range(length)), 20)
    scheduler.add(second)
    work = {sequence.request_id: work for sequence, work in scheduler.schedule(lambda _: 0)}["b"]
    assert (work.start, work.count) == (hit, length - hit) and second.stats.prefix_hit == hit
    assert second.pages[: hit // SIZE] == first.pages[: hit // SIZE]


def test_samples_wait_for_the_first_and_then_share_its_prompt_pages() -> None:
    scheduler = make_scheduler(12)
    leader = make_sequence("0", [1] * 9, 20)
    followers = [make_sequence(str(n), [1] * 9, 20, leader) for n in (1, 2)]
    for sequence in (leader, *followers):
        scheduler.add(sequence)
    planned = scheduler.schedule(lambda _: 0)
    assert [sequence.request_id for sequence, _ in planned] == ["0"]
    leader.in_flight, leader.num_computed = False, 9
    scheduler.publish(leader)
    leader.tokens.append(5)
    scheduler.slots.append(leader.slot or 0, [5])
    planned = scheduler.schedule(lambda _: 0)
    assert [(sequence.request_id, work.start) for sequence, work in planned] == [("0", 9), ("1", 8), ("2", 8)]
    assert all(sequence.pages[:2] == leader.pages[:2] for sequence in followers)
