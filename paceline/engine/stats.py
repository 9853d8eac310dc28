"""What happened: per round for the engine, per sequence for the user."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

RECENT_ROUNDS = 4096
VAIN_ROUNDS = 300  # with drafts, none of which was accepted: not even a poor drafter is that unlucky

log = logging.getLogger("paceline")


class RoundRecord(NamedTuple):
    """One round's size and cost, kept from the first day so that a cost model can be fitted."""

    rows: int
    sequences: int
    context: int  # committed positions attended to, summed over sequences
    proposed: int
    accepted: int
    emitted: int
    draft_seconds: float
    verify_seconds: float  # forward, pipeline and verdict
    rest_seconds: float  # scheduling, packing, committing, detokenising
    nodes: int | None = None  # that each sequence might have; None: not a usual round of decoding alone
    met: tuple[list[int], ...] = ()  # the nodes that were accepted, by sequence


def add_by_position(counts: Iterable[list[int]]) -> list[int]:
    """Several counts by position in the draft as one; a shorter one has nothing further on."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


@dataclass
class SequenceStats:
    """One sample's figures. A round is one target forward that could commit tokens for it."""

    rounds: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=list)  # by depth: rounds that proposed a token there
    accepted: list[int] = field(default_factory=list)  # by depth: rounds that accepted one there
    proposed_by: dict[str, list[int]] = field(default_factory=dict)  # the same as proposed, where several may draft
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0
    prefix_hit: int = 0
    preemptions: int = 0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each depth: of the rounds that proposed a token there, the share that accepted one."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed)]

    @property
    def acceptance(self) -> float:
        """Accepted tokens over the most that could have been accepted."""
        return sum(self.accepted) / sum(self.proposed) if sum(self.proposed) else 0.0

    def count(self, sampled: bool, emitted: int, seconds: tuple[float, float, float]) -> None:
        self.rounds += sampled
        self.tokens += emitted
        draft, verify, rest = seconds
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.rest_seconds += rest

    def count_drafts(self, proposed_depth: int, accepted: int) -> None:
        if proposed_depth > len(self.proposed):
            self.accepted += [0] * (proposed_depth - len(self.proposed))
            self.proposed += [0] * (proposed_depth - len(self.proposed))
        for depth in range(proposed_depth):
            self.proposed[depth] += 1
        for depth in range(min(accepted, proposed_depth)):
            self.accepted[depth] += 1

    def credit(self, drafter: str, depth: int) -> None:
        """One of several drafted so deep."""
        before = self.proposed_by.get(drafter, [])
        more = [*before, *[0] * (depth - len(before))]
        self.proposed_by[drafter] = [rounds + (number < depth) for number, rounds in enumerate(more)]


class EngineStats:
    """Totals and the most recent rounds."""

    def __init__(self) -> None:
        self.rounds = 0
        self.emitted = 0
        self.recent: deque[RoundRecord] = deque(maxlen=RECENT_ROUNDS)
        self.watch(None)

    def watch(self, drafter: str | None) -> None:
        """The name of who drafts from here on, if it has weights: they may have been trained for another target."""
        self._watched, self._vain = drafter, 0

    def add(self, record: RoundRecord) -> None:
        self.rounds += 1
        self.emitted += record.emitted
        self.recent.append(record)
        if self._watched is not None and record.proposed:
            self._doubt(self._watched, record.accepted)

    def _doubt(self, drafter: str, accepted: int) -> None:
        """Say once that nothing was ever accepted; with the first token that is, all is well."""
        self._vain += 1
        if accepted:
            self.watch(None)
        elif self._vain == VAIN_ROUNDS:
            self.watch(None)
            log.warning(
                "the drafter %r has drafted for %d rounds and not one token was accepted; it probably belongs to "
                "another target (the text is right all the same, only no faster)",
                drafter,
                VAIN_ROUNDS,
            )
