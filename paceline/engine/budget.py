"""How many nodes each sequence may get in a round.

A budget sees how many sequences run and what earlier rounds brought and cost. It answers a number, and knows no trees
or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.engine.ladder import FEW, NODES, up
from paceline.engine.luck import Luck, NodeLuck
from paceline.engine.stats import EngineStats, RoundRecord

if TYPE_CHECKING:  # the command line names budgets, and waits for nothing heavy
    from paceline.drafters.base import Drafter

BUDGETS = ("auto", "fixed", "measured")
Costs = Mapping[tuple[int, int], float]  # (sequences, nodes of each) → seconds of a round

RECENT = 16  # rounds whose seconds count
KNOWN = 2  # rounds that tell what others like them take
FAR = 3.0  # times what most rounds take, or more: something else went on
TRIAL, SETTLED = 4, 8  # rounds until the next decision, where the choice is new and where it is not
APART = 7 / 8  # of the most nodes; what is nearer is not another choice
CLEARLY = 1.03  # so much better must another be
HOPE = 0.8  # what brings less of the best's is not looked at again, if there are others; 0 always is
REST, LONGEST_REST = 64, 256  # rounds between two looks at others; twice as many each time
LOOKS = 0.01  # of what the best brings may be lost by them
OWED = 25.0  # rounds of the best: what looks cost too much is paid for no longer than that takes


class Budget(Protocol):
    def choose(self, num_running: int, history: EngineStats) -> int:
        """The most nodes per sequence; 0 is plain decoding."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same; limits of length and of the single request are applied by the engine."""

    max_nodes: int

    def choose(self, num_running: int, history: EngineStats) -> int:
        return self.max_nodes


class MeasuredBudget:
    """As many nodes as bring most tokens a second while about so many sequences run; 0 where drafting does not pay.

    Tokens and seconds are learned apart: what drafts bring (`Luck`) is the same however many sequences run, and seconds
    hardly vary, so that a few rounds, or rounds that were timed before the first request, tell them. What nobody has
    measured lies between its neighbours; above all of them one more is tried, if it could win at no cost at all. Now
    and then another than the best gets a few rounds. Its answers follow from the records alone; it reads each once.
    ahead: rounds of at most so many nodes overlap with the host's work, so one takes what lies between two that were
    read; -1: none do.
    """

    def __init__(self, max_nodes: int, ahead: int = -1, luck: Luck | NodeLuck | None = None) -> None:
        self.ahead = ahead
        self.arms = [*(nodes for nodes in NODES if nodes < APART * max_nodes), max_nodes]
        self._luck = luck or Luck(max_nodes)
        self._loads: dict[int, Load] = {}
        self._seen: int | None = None  # rounds of the history; what came before the first choice was another's

    def tell(self, costs: Costs) -> None:
        """Seconds of rounds that were timed with nobody in them: right but for what is the same for all of a load."""
        for (sequences, nodes), seconds in costs.items():
            if nodes in self.arms:
                self._load(sequences).told[nodes] = seconds

    def choose(self, num_running: int, history: EngineStats) -> int:
        for record in self._unseen(history):
            self._learn(record)
        load = self._load(num_running)
        load.pass_round()
        if load.left < 0:
            seconds = self._seconds(load)
            load.decide({nodes: self._luck.tokens(nodes) / seconds[nodes] for nodes in seconds})
        return load.arm

    def _unseen(self, history: EngineStats) -> list[RoundRecord]:
        count = 0 if self._seen is None else min(history.rounds - self._seen, len(history.recent))
        self._seen = history.rounds
        return [history.recent[-back] for back in range(count, 0, -1)]

    def _learn(self, record: RoundRecord) -> None:
        self._luck.rounds += 1
        if record.nodes is None or not record.met:
            return
        if record.nodes:
            self._luck.learn(record.nodes, record.met)
        seconds = record.verify_seconds + (
            0.0 if record.nodes <= self.ahead else record.draft_seconds + record.rest_seconds
        )
        load, seconds = self._load(record.sequences), max(seconds, 1e-9)
        load.spend(record.nodes, seconds)
        if load.best not in (-1, record.nodes):
            load.charge(seconds, self._luck.tokens(record.nodes) / self._luck.tokens(load.best))

    def _load(self, sequences: int) -> Load:
        size = up(sequences, FEW) or sequences | 255
        if size not in self._loads:
            self._loads[size] = Load(size, ahead=self.ahead)
        return self._loads[size]

    def _seconds(self, load: Load) -> dict[int, float]:
        """Of the numbers of nodes that may be chosen: known, between those of other loads, between known; one more."""
        known = load.known()
        others = {other.size: other.known() for other in self._loads.values()} if len(known) < len(self.arms) else {}
        for nodes in self.arms:
            if nodes not in known:
                sizes = {size: table[nodes] for size, table in others.items() if nodes in table}
                if (seconds := between(load.size, sizes)) is not None:
                    known[nodes] = seconds
        if 0 not in known:
            return {0: 1.0}  # what all others are measured against comes first
        for nodes in self.arms:
            if nodes not in known and (seconds := between(nodes, known)) is not None:
                known[nodes] = seconds
        above = [nodes for nodes in self.arms if nodes > max(known)]
        return {**known, **dict.fromkeys(above[:1], known[max(known)])}


def between(place: int, known: Mapping[int, float]) -> float | None:
    """On the line between the neighbours of a place; None: it has not two."""
    below = max((other for other in known if other < place), default=None)
    above = min((other for other in known if other > place), default=None)
    if below is None or above is None:
        return None
    return known[below] + (known[above] - known[below]) * (place - below) / (above - below)


@dataclass
class Load:
    """What is known, and chosen, while about so many sequences run. All by nodes."""

    size: int
    told: dict[int, float] = field(default_factory=dict)
    ahead: int = -1  # rounds of at most so many nodes overlap with the host's work
    spent: dict[int, list[float]] = field(default_factory=dict)  # by each of the last rounds
    measured: dict[int, float] = field(default_factory=dict)  # what follows from those, until there are more
    latest: dict[bool, int] = field(default_factory=dict)  # of the last round that did overlap, and that did not
    best: int = -1
    arm: int = 0  # the best, or one that is looked at
    left: int = 0  # rounds until the next decision
    rest: int = REST
    rested: int = 0
    saved: float = 0.0  # rounds of the best that a look may cost; below 0: one cost more than it was thought to
    price: float = 0.0  # of them, what a round of the latest look was thought to cost
    looks: int = 0  # and how many of them were at others than 0
    others: int = 0

    def pass_round(self) -> None:
        self.left, self.rested, self.saved = self.left - 1, self.rested + 1, min(self.saved + LOOKS, TRIAL)

    def spend(self, nodes: int, seconds: float) -> None:
        self.spent[nodes] = [*self.spent.get(nodes, ())[1 - RECENT :], seconds]
        self.measured.pop(nodes, None)
        self.latest[nodes <= self.ahead] = nodes

    def charge(self, seconds: float, worth: float) -> None:
        """A round of another than the best took so long, and brought so many rounds of the best's tokens. What that
        cost more than was thought is paid before the next look: a drafter may have had much to read first."""
        spent = self.spent.get(self.best, [])
        if len(spent) >= KNOWN:
            self.saved = max(self.saved - max(0.0, seconds / usual(spent) - worth - max(0.0, self.price)), -OWED)

    def known(self) -> dict[int, float]:
        """Seconds: measured; else as told, and as much more, or less in proportion, as the latest took that overlapped
        as well with the host's work, or did not either."""
        told, measured = dict(self.told), self.measured
        for nodes in self.spent.keys() - measured.keys():
            if len(self.spent[nodes]) >= KNOWN:
                measured[nodes] = usual(self.spent[nodes])
        for overlapped, latest in self.latest.items():
            if latest in measured and latest in self.told:
                least, now = self.told[latest], measured[latest]
                for nodes in (nodes for nodes in told if (nodes <= self.ahead) == overlapped):
                    told[nodes] = told[nodes] * min(1.0, now / least) + max(0.0, now - least)
        return {**told, **measured}

    def decide(self, rates: Mapping[int, float]) -> None:
        """The best, and now and then another."""
        before, first = self.arm, max(rates, key=rates.__getitem__)
        if self.best not in rates or rates[first] > CLEARLY * rates[self.best]:
            self.best, self.rest, self.rested, self.saved = first, REST, 0, min(0.0, self.saved)
        self.arm = self.best
        if self.rested >= self.rest and len(rates) > 1:
            self._look(rates)
        spent = self.spent.get(self.arm, [])
        if self.arm != before:
            self.spent[self.arm] = spent[-KNOWN:]  # times may have changed
        self.left = (SETTLED if self.arm == self.best and len(spent) >= KNOWN else TRIAL) - 1

    def _look(self, rates: Mapping[int, float]) -> None:
        """At 0 and at others in turns; what costs too much as yet holds nobody up."""
        others = sorted(rates.keys() - {self.best}, key=lambda nodes: -rates[nodes])
        hopeful = [nodes for nodes in others if rates[nodes] > HOPE * rates[self.best]] or others[:1]
        turn = hopeful[self.others % len(hopeful)]
        for arm in (0, turn) if self.best and self.looks % 2 == 0 else (turn,):
            cost = TRIAL * (1 - rates[arm] / rates[self.best])
            if cost <= self.saved:
                self.arm, self.looks, self.others = arm, self.looks + 1, self.others + (arm == turn)
                self.rest, self.rested = min(2 * self.rest, LONGEST_REST), 0
                self.saved, self.price = self.saved - cost, cost / TRIAL
                return


def usual(spent: list[float]) -> float:
    """The mean of what is not far longer than others: a round in which something is made first is none."""
    most = FAR * sorted(spent)[(len(spent) - 1) // 2]
    near = [seconds for seconds in spent if seconds <= most]
    return sum(near) / len(near)


def make_budget(kind: str, drafter: Drafter | None, ahead: int) -> Budget:
    most = 0 if drafter is None else drafter.max_nodes
    if drafter is None or kind != "measured" or not most:
        return FixedBudget(most)
    nested = drafter.trees and getattr(drafter, "nested", False)  # who has no base does not say
    return MeasuredBudget(most, ahead, NodeLuck(most) if nested else Luck(most, drafter.trees))
