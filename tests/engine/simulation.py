"""A scheduler at work with made-up sequences: random arrivals, lengths, stops, aborts, samples and failures.

A round here is launched and committed as the engine does it, but the target is a random number: how many nodes it
accepts. It decides when the round is launched, on a device of lists; the host hears of it up to two rounds later. After
every operation the whole of the books is checked.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

import torch

from paceline.cache.pages import PagePool, page_key
from paceline.cache.slots import Slots
from paceline.cache.windowed import WindowPages
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.round import Plan as Launch
from paceline.engine.scheduler import MustRead, Planned, Scheduler
from paceline.engine.sequence import Sequence
from paceline.engine.windowed import WindowedScheduler
from paceline.models.batch import Work
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
    behind: int
    spread: int = 0  # of trees: nodes that may lie behind a limit
    width: int = 0  # of windows whose layers have pages of their own; 0: there are none
    more: int = 0  # pages of these beyond what one sequence needs

    @property
    def num_windowed(self) -> int:
        """One sequence can always go on: with all that it has, or with what it sees and a round's rows."""
        return min(-(-MAX_LENGTH // SIZE) + 1, -(-(self.width + self.max_rows) // SIZE) + 2) + self.more


@dataclass
class Flying:
    """A round on its way, and the tokens it appends to each sequence: accepted ones and one more; none: a chunk."""

    launch: Launch
    decided: list[list[int]]


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.pool = PagePool(plan.num_pages, SIZE)
        pages = -(-(MAX_LENGTH + plan.spread) // SIZE)
        self.slots = Slots(plan.num_slots, MAX_LENGTH, pages, torch.device("cpu"), apart=plan.behind > 0)
        if plan.width:
            self.slots.windowed = WindowPages(self.slots, PagePool(plan.num_windowed, SIZE), plan.width)
        kind = WindowedScheduler if plan.width else Scheduler
        self.scheduler = kind(self.pool, self.slots, plan.max_rows, plan.prefix_caching)
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}  # what pages under windows hold, page and place
        self.scheduler.on_enter, self.slots.spread = self.entered, plan.spread
        self.all: list[Sequence] = []
        self.device: dict[str, list[int]] = {}  # what is committed there, by name; the host hears of it later
        self.in_flight: deque[Flying] = deque()
        self.fitting: dict[str, int] = {}  # nodes each may have with the pages that are there when it is asked
        self.order: list[str] = []  # first admissions
        self.preempted = self.must_read = self.void = self.most_ahead = 0
        self._preempt = self.scheduler._preempt
        self.scheduler._preempt = self.preempt  # type: ignore[method-assign]

    def watch(self, sequence: Sequence) -> None:
        """Note what drafts the pages allow when the sequence is asked how long they may be."""
        asked = sequence.most_nodes

        def most_nodes(budget: int, room: int) -> int:
            nodes = asked(budget, room)
            _, reach, left = sequence.outlook()
            assert nodes == min(self.plan.max_nodes, max(0, left - 1 + self.plan.spread))
            held = len(sequence.pages)
            furthest = min(reach + nodes, sequence.max_length + self.plan.spread)
            fits = -(-furthest // SIZE) - held <= self.pool.num_available
            self.fitting[sequence.request_id] = nodes if fits else max(0, min(nodes, held * SIZE - reach))
            return nodes

        sequence.most_nodes = most_nodes  # type: ignore[method-assign]

    def entered(self, sequence: Sequence) -> None:
        self.device[sequence.request_id] = list(sequence.tokens)
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
            self.watch(sequence)
            self.scheduler.add(sequence)

    def abort(self) -> None:
        alive = [sequence for sequence in self.all if sequence.finish_reason is None]
        if alive:
            sequence = self.random.choice(alive)
            sequence.finish_reason = "abort"
            if not sequence.ahead:
                self.scheduler.leave(sequence)

    def fail(self) -> None:
        """Something went wrong in a round: what is in flight is lost, and everybody starts over."""
        waiting = [*self.scheduler.running, *self.scheduler.waiting]
        self.in_flight.clear()
        self.scheduler.reset()
        assert not self.scheduler.running
        assert list(self.scheduler.waiting) == [sequence for sequence in waiting if sequence.finish_reason is None]
        assert self.pool.num_available == self.plan.num_pages and self.slots.num_free == self.plan.num_slots
        if self.slots.windowed is not None:
            assert self.slots.windowed.pool.num_available == self.plan.num_windowed

    def pages_are_short(self) -> bool:
        """Under windows a chunk's rows may ask for several pages at a time."""
        windowed = self.slots.windowed
        short = windowed is not None and windowed.pool.num_available < -(-self.plan.max_rows // SIZE) + 2
        return short or self.pool.num_available == 0

    def launch(self) -> bool:
        self.fitting.clear()
        try:
            planned = self.scheduler.schedule(self.plan.max_nodes)
        except MustRead:
            assert self.pages_are_short() and self.in_flight, "there was nothing to read, or no need to"
            self.must_read += 1
            self.check()
            self.read_all()
            self.fitting.clear()
            planned = self.scheduler.schedule(self.plan.max_nodes)
        flying = {id(sequence): len(sequence.ahead) for sequence in self.all}
        self.check_planned(planned, self.fitting)
        if planned:
            launch = Launch.of(planned)
            decided = [self.run_one(*item) for item in zip(launch.sequences, launch.work)]
            launch.launch()
            self.in_flight.append(Flying(launch, decided))
            for sequence in launch.sequences:
                assert len(sequence.ahead) == flying[id(sequence)] + 1
                self.most_ahead = max(self.most_ahead, len(sequence.ahead))
        else:
            idle = not self.scheduler.waiting and not self.scheduler.running
            assert idle or self.in_flight, "there is work, but none can be planned"
        return bool(planned)

    def check_planned(self, planned: list[Planned], fitting: dict[str, int]) -> None:
        assert len({id(sequence) for sequence, _ in planned}) == len(planned), "somebody is scheduled twice"
        for sequence, work in planned:
            assert sequence.finish_reason is None and work.slot == sequence.slot and work.count >= 1
            assert (work.start is None) == any(sequence.ahead), "the host knows where it stands, or it does not"
            most = fitting.get(sequence.request_id, 0)
            shorter = self.plan.width and work.num_nodes < most  # the pages under windows may allow less
            assert shorter or work.num_nodes == most, "drafts as long as pages allow, not longer"
            real = self.device[sequence.request_id]
            if work.start is None:
                assert work.count == 1 and len(real) <= sequence.outlook()[1] <= sequence.max_length
            else:
                assert work.start == sequence.num_launched and work.start + work.count <= len(sequence.tokens)
                assert work.num_nodes == 0 or work.start + 1 == len(sequence.tokens), "only decoding sequences draft"
            start = len(real) - 1 if work.start is None else work.start
            room = sequence.max_length - len(real) - 1 + self.plan.spread
            nodes = min(work.num_nodes, room)  # the device cuts what has no room
            assert len(sequence.pages) * SIZE >= start + work.count + max(nodes, 0), "pages do not cover the work"
        rows = sum(work.count + work.num_nodes for sequence, work in planned if sequence.request_id in fitting)
        chunks = sum(work.count for sequence, work in planned if sequence.request_id not in fitting)
        assert chunks <= max(self.plan.max_rows - rows, min(SIZE, self.plan.max_rows))

    def run_one(self, sequence: Sequence, work: Work) -> list[int]:
        before = len(self.device[sequence.request_id])
        self.look_back(sequence, work)
        decided = self.decide(sequence, work)
        self.come_true(sequence, work, before, decided)
        return decided

    def decide(self, sequence: Sequence, work: Work) -> list[int]:
        """On the device, when the round is launched: how much of the draft is right, and one token more."""
        if work.start is not None and work.start + work.count < len(sequence.tokens):
            return []
        real = self.device[sequence.request_id]
        room = sequence.max_length - len(real)
        accepted = self.random.randint(0, max(0, min(work.num_nodes, room - 1 + self.plan.spread)))
        new = [self.random.choice([7, 8]) for _ in range(accepted + 1)]
        real += new[:room]
        return new

    def look_back(self, sequence: Sequence, work: Work) -> None:
        """On the device, before anything is decided: each row stores its text under windows, and what it sees of other
        positions must be the text it stands in. A node's row holds nothing, until its token comes true."""
        windowed, real = self.slots.windowed, self.device[sequence.request_id]
        if windowed is None:
            return
        start = len(real) - 1 if work.start is None else work.start
        pages, held = windowed.table.host[work.slot], windowed.held[work.slot]
        for position in range(start, start + work.count):
            assert held.first <= position // SIZE < held.end, "a row has no page"
            self.contents[int(pages[position // SIZE]), position % SIZE] = tuple(real[: position + 1])
            for seen in range(max(0, position - self.plan.width + 1), position):
                text = self.contents.get((int(pages[seen // SIZE]), seen % SIZE))
                assert text == tuple(real[: seen + 1]), "a row sees what is not its text"
        for line in range(start + work.count, start + work.count + work.num_nodes):
            if line < sequence.max_length + self.plan.spread:  # the device cuts what has no room
                assert line // SIZE < held.end, "a node has no page"
                self.contents[int(pages[line // SIZE]), line % SIZE] = ()

    def come_true(self, sequence: Sequence, work: Work, before: int, decided: list[int]) -> None:
        """Accepted nodes are at their places."""
        windowed, real = self.slots.windowed, self.device[sequence.request_id]
        if windowed is None:
            return
        for position in range(before, min(before + len(decided) - 1, len(real))):
            page = int(windowed.table.host[work.slot, position // SIZE])
            self.contents[page, position % SIZE] = tuple(real[: position + 1])

    def preempt(self, sequence: Sequence) -> None:
        assert self.pages_are_short(), "somebody was preempted while there were pages"
        assert not any(other.ahead for other in self.scheduler.running), "a round in flight uses these pages"
        assert sequence is self.scheduler.running[-1], "not the newest"
        self.preempted += 1
        self._preempt(sequence)

    def read_all(self) -> None:
        while self.in_flight:
            self.commit()
            self.check()

    def commit(self) -> None:
        round_ = self.in_flight.popleft()
        launch = round_.launch
        for sequence, work, decided in zip(launch.sequences, launch.work, round_.decided):
            sequence.ahead.pop(0)
            if sequence.finish_reason is not None:
                self.void += 1
                continue
            start = len(sequence.tokens) - 1 if work.start is None else work.start
            kept = decided[: sequence.max_length - len(sequence.tokens)]  # of a tree more may be accepted than has room
            if kept and self.random.random() < 0.05:  # a stop token, somewhere in what was accepted
                kept = kept[: self.random.randint(1, len(kept))]
                sequence.finish_reason = "stop"
            sequence.tokens += kept
            self.slots.append([work.slot], [kept])
            sequence.num_computed = min(start + work.count + max(0, len(decided) - 1), len(sequence.tokens))
            if not sequence.ahead:
                sequence.num_launched = sequence.num_computed
            assert len(sequence.tokens) <= sequence.max_length
            if len(sequence.tokens) == sequence.max_length and sequence.finish_reason is None:
                sequence.finish_reason = "length"
            self.scheduler.publish(sequence)
        for sequence in launch.sequences:
            if sequence.finish_reason is not None and not sequence.ahead and sequence.slot is not None:
                self.scheduler.leave(sequence)

    def check(self) -> None:
        """Every page, slot, reference and round in flight is where the books say."""
        self.pool.check()
        running = self.scheduler.running
        if self.slots.windowed is not None:
            self.slots.windowed.check()
            assert sorted(self.slots.windowed.held) == sorted(sequence.slot or 0 for sequence in running)
        holders = Counter(page for sequence in running for page in sequence.pages)
        numbers = range(self.pool.num_pages + 1)
        assert [self.pool.refs(page) for page in numbers] == [holders[page] for page in numbers]
        slots = [sequence.slot for sequence in running]
        assert None not in slots and len(set(slots)) == len(slots) and self.slots.null not in slots
        assert self.slots.num_free == self.plan.num_slots - len(slots)
        assert not {id(s) for s in running} & {id(s) for s in self.scheduler.waiting}
        flying: dict[int, list[int]] = {}
        for round_ in self.in_flight:
            for sequence, work, decided in zip(round_.launch.sequences, round_.launch.work, round_.decided):
                flying.setdefault(id(sequence), []).append(1 + work.num_nodes if decided else 0)
        assert flying == {id(sequence): sequence.ahead for sequence in running if sequence.ahead}
        for sequence in running:
            self.check_running(sequence, holders)
        for sequence in self.scheduler.waiting:
            assert sequence.slot is None and not sequence.pages and not sequence.ahead
            assert sequence.num_computed == sequence.num_launched == 0

    def check_running(self, sequence: Sequence, holders: Counter[int]) -> None:
        full = sequence.num_computed // SIZE
        for number, page in enumerate(sequence.pages):
            if holders[page] > 1:
                assert number < full, "a page that is not full and computed is shared"
                assert self.pool.lookup(sequence.keys[number]) == page, "a page is shared but not published"
        assert len(sequence.keys) <= full, "a page nobody has confirmed is published"
        assert self.slots.tokens.host[sequence.slot, : len(sequence.tokens)].tolist() == sequence.tokens
        assert self.slots.pages.host[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages
        key = b""
        for number in range(len(sequence.keys)):
            key = page_key(key, sequence.tokens[number * SIZE : (number + 1) * SIZE])
            assert sequence.keys[number] == key
        if sequence.finish_reason is None:
            real = self.device[sequence.request_id]
            assert real[: len(sequence.tokens)] == sequence.tokens
            least = len(sequence.tokens) + sum(most > 0 for most in sequence.ahead)
            assert min(least, sequence.max_length) <= len(real) <= sequence.outlook()[1] <= sequence.max_length
            assert sequence.ahead or sequence.num_launched == sequence.num_computed < len(sequence.tokens)

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
        elif action < 0.4:
            simulation.fail()
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
    while len(simulation.in_flight) > (simulation.plan.behind if launched else 0):
        simulation.commit()
        simulation.check()
