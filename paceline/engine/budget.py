"""How many nodes each sequence may get in a round.

A budget sees how many sequences run and what earlier rounds cost. It answers a number, and knows no trees or tokens.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from paceline.engine.stats import EngineStats, RoundRecord

BUDGETS = ("auto", "fixed", "measured")
TRIAL = 6  # rounds after which a number of nodes is judged
REMEMBERED = 64  # rounds of each that count
SETTLED = 16  # rounds between two looks at which is best
REST, LONGEST_REST = 64, 1024  # rounds before another is tried again; twice as many each time
HOPE, EVERYBODY = 0.8, 8  # what brought less of the best's is left out, but for every eighth time
CLEARLY = 1.05  # so much better than the best so far is another


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

    For each power of two of sequences it tries every number of `arms` for a few rounds, then stays with the best, and
    tries the others again, ever more rarely. What it answers follows from the records alone; it reads each once.
    ahead: rounds of at most so many nodes overlap with the host's work, so one takes what lies between two that were
    read; -1: none do.
    """

    def __init__(self, max_nodes: int, ahead: int = -1) -> None:
        self.ahead = ahead
        halves = [2**power for power in reversed(range(max_nodes.bit_length())) if 2 * 2**power <= max_nodes]
        self.arms = [max_nodes, 0, *halves]  # in the order they are tried
        self._loads: dict[int, Load] = {}
        self._seen = 0

    def choose(self, num_running: int, history: EngineStats) -> int:
        for record in self._unseen(history):
            if record.nodes is not None and record.emitted:
                seconds = record.verify_seconds
                seconds += 0 if record.nodes <= self.ahead else record.draft_seconds + record.rest_seconds
                self._load(record.sequences).learn(record.nodes, record.emitted / record.sequences, seconds)
        return self._load(num_running).arm

    def _unseen(self, history: EngineStats) -> Iterator[RoundRecord]:
        count = min(history.rounds - self._seen, len(history.recent))
        self._seen = history.rounds
        return islice(history.recent, len(history.recent) - count, None)

    def _load(self, sequences: int) -> Load:
        size = sequences.bit_length()
        if size not in self._loads:
            self._loads[size] = Load(self.arms)
        return self._loads[size]


@dataclass
class Load:
    """What is known while about so many sequences run."""

    arms: list[int]
    taken: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)  # tokens of a sequence, seconds
    tries: int = 0  # arms that were tried, over and over
    left: int = TRIAL  # rounds until the next decision
    rest: int = REST
    rested: int = 0
    best: int = -1
    arm: int = -1

    def __post_init__(self) -> None:
        self.taken = {nodes: deque(maxlen=REMEMBERED) for nodes in self.arms}
        self.arm = self.arms[0]

    def learn(self, nodes: int, tokens: float, seconds: float) -> None:
        if nodes in self.taken:
            self.taken[nodes].append((tokens, seconds))
        if nodes != self.arm:  # a request's own limit, or a round that was launched before the last decision
            return
        self.left, self.rested = self.left - 1, self.rested + 1
        if self.left <= 0:
            self._decide()

    def _decide(self) -> None:
        """The next that nobody knows yet; else the best, and now and then another."""
        unknown = [nodes for nodes in self.arms if len(self.taken[nodes]) < TRIAL]
        if unknown:
            self.arm, self.left, self.rested = unknown[0], TRIAL, 0
            return
        rates = {nodes: self.rate(nodes) for nodes in self.arms}
        best = max(self.arms, key=rates.__getitem__)
        if best != self.best and rates[best] > CLEARLY * rates.get(self.best, 0.0):
            if self.best in rates:  # luck has changed, so what is known of the rest is old
                for nodes in {*self.arms} - {best, self.best}:
                    self.taken[nodes].clear()
            self.best, self.rest = best, REST
        self.arm, self.left, best = self.best, SETTLED, self.best
        if self.rested >= self.rest:
            self.tries, self.rest, self.rested = self.tries + 1, min(2 * self.rest, LONGEST_REST), 0
            least = 0.0 if self.tries % EVERYBODY == 0 else HOPE * rates[best]
            others = [nodes for nodes in self.arms if nodes != best and rates[nodes] >= least]
            if others:
                self.arm, self.left = others[self.tries % len(others)], TRIAL
                self.taken[self.arm] = deque(list(self.taken[self.arm])[-TRIAL:], REMEMBERED)  # times may have changed

    def rate(self, nodes: int) -> float:
        """Tokens a second of one sequence. The median of seconds: a round in which something is made first is none."""
        taken = self.taken[nodes]
        if not taken:
            return 0.0
        tokens = statistics.fmean(tokens for tokens, _ in taken)
        return tokens / max(statistics.median(seconds for _, seconds in taken), 1e-9)


def make_budget(kind: str, max_nodes: int, ahead: int) -> Budget:
    return MeasuredBudget(max_nodes, ahead) if kind == "measured" and max_nodes else FixedBudget(max_nodes)
