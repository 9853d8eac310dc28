"""What is to be measured, plain and with each drafter, and what was: answers, their times, speed-ups.

Knows what counts together. Runs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.bench.differences import Difference
from paceline.bench.interval import Cost, Estimate, estimate
from paceline.bench.peers import Peer
from paceline.engine.stats import SequenceStats, add_by_position
from paceline.errors import OptionError
from paceline.outputs import CompletionOutput
from paceline.params import SamplingParams
from paceline.prompts import Prompt

PLAIN = "plain"


@dataclass(frozen=True)
class Variant:
    """A way to decode: its name in reports, and its drafter's config; None is plain decoding."""

    name: str
    drafter: Any
    draft_length: int | None = None  # of a sweep: the most tokens drafted in a round
    peer: Peer | None = None  # another program, which decodes in its own way


@dataclass(frozen=True)
class Plan:
    """What to measure. Plain decoding is always measured, once in every round."""

    names: list[str]  # of the prompts, for reports
    prompts: list[Prompt]
    params: SamplingParams
    drafters: list[Variant]
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise OptionError(f"rounds={self.rounds} is not allowed; allowed: 1 or more")
        if not self.params.greedy and self.params.seed is None:
            raise OptionError("a comparison at a temperature above 0 needs a seed, or no two runs say the same")
        seen = {PLAIN}
        for variant in self.drafters:
            if variant.drafter is None and variant.peer is None:
                raise OptionError(f"drafter {variant.name!r} is plain decoding, which is measured anyway; leave it out")
            if variant.name in seen:
                raise OptionError(f"drafter {variant.name!r} was given twice; name each once")
            seen.add(variant.name)

    @property
    def variants(self) -> list[Variant]:
        return [Variant(PLAIN, None), *self.drafters]


@dataclass
class Answer:
    prompt: int  # its number in the plan
    output: CompletionOutput
    seconds: float  # answers that were computed together share each round's time equally


@dataclass
class Pass:
    """One variant's run over the prompts."""

    seconds: float
    answers: list[Answer]  # in the order of the prompts
    complete: bool = True  # else it was interrupted, and these answers were ready
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(answer.output.token_ids) for answer in self.answers)

    def add(self, other: Pass) -> None:
        """What came after it."""
        self.answers += other.answers
        self.complete = self.complete and other.complete
        for name in ("seconds", "draft_seconds", "verify_seconds", "rest_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Measured:
    """What one variant did: its complete passes, or the one that was interrupted if there is no other."""

    variant: Variant
    passes: list[Pass] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)  # at most one a prompt

    @property
    def seconds(self) -> float:
        return statistics.median(done.seconds for done in self.passes)

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(done.tokens / done.seconds for done in self.passes)

    @property
    def num_identical(self) -> int:
        return len(self.passes[0].answers) - len(self.differences)

    @property
    def stats(self) -> SequenceStats:
        """Counts of all answers together. Their times are not summed: sequences of one round share its time."""
        total = SequenceStats()
        for output in (answer.output for done in self.passes for answer in done.answers):
            total.rounds += output.stats.rounds
            total.tokens += output.stats.tokens
            total.proposed = add_by_position([total.proposed, output.stats.proposed])
            total.accepted = add_by_position([total.accepted, output.stats.accepted])
        return total


@dataclass
class Comparison:
    """The whole result. An interrupted one holds what was measured by then."""

    plan: Plan
    measured: list[Measured]  # plain first; only variants with an answer
    interrupted: bool = False

    @property
    def plain(self) -> Measured:
        return self.measured[0]

    def speed_up(self, measured: Measured) -> Estimate:
        """In time, over plain decoding."""
        return estimate_between(self.plain, measured)

    def forward_speed_up(self, measured: Measured) -> Estimate:
        """In forwards of the target, over plain decoding."""
        return estimate_between(self.plain, measured, lambda answer: answer.output.stats.rounds)


def estimate_between(
    base: Measured, other: Measured, spent: Callable[[Answer], float] = lambda answer: answer.seconds
) -> Estimate:
    """Over the rounds and prompts that both have."""
    rounds = min(len(base.passes), len(other.passes))
    common = set.intersection(
        *({answer.prompt for answer in done.answers} for one in (base, other) for done in one.passes[:rounds])
    )

    def cost(measured: Measured) -> Cost:
        rows = [[a for a in done.answers if a.prompt in common] for done in measured.passes[:rounds]]
        tokens = [[len(answer.output.token_ids) for answer in row] for row in rows]
        return Cost(np.array([[spent(answer) for answer in row] for row in rows], float), np.array(tokens, float))

    return estimate(cost(base), cost(other))
