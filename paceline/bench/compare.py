"""The same prompts, plain and with each drafter: how fast, and whether the text is the same.

Knows the order of a fair measurement and what to count. Prints and draws nothing; must not know the command line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from paceline.engine.stats import SequenceStats
from paceline.errors import OptionError, PacelineError
from paceline.llm import LLM
from paceline.outputs import CompletionOutput, completion
from paceline.params import SamplingParams
from paceline.prompts import Prompt

PLAIN = "plain"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Variant:
    """A way to decode: its name in reports, and its drafter's config; None is plain decoding."""

    name: str
    drafter: Any


@dataclass(frozen=True)
class Plan:
    """What to measure. Plain decoding is always measured, first in every round."""

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
            if variant.drafter is None:
                raise OptionError(f"drafter {variant.name!r} is plain decoding, which is measured anyway; leave it out")
            if variant.name in seen:
                raise OptionError(f"drafter {variant.name!r} was given twice; name each once")
            seen.add(variant.name)

    @property
    def variants(self) -> list[Variant]:
        return [Variant(PLAIN, None), *self.drafters]


@dataclass
class Pass:
    """One variant's run over all prompts."""

    seconds: float
    outputs: list[CompletionOutput]  # in the order of the prompts
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True)
class Difference:
    """Where an answer left the plain one, and how far apart the target's two likeliest tokens were there."""

    prompt: int
    round: int
    position: int  # of the first differing token, counted from the answer's first
    expected: int | None  # None: the plain answer had ended
    got: int | None
    margin: float | None  # of log-probabilities; None: not recomputed (sampled text, or interrupted)


@dataclass
class Measured:
    """What one variant did, over all of its passes."""

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
    def stats(self) -> SequenceStats:
        """Counts of all answers together. Their times are not summed: sequences of one round share its time."""
        total = SequenceStats()
        for output in (output for done in self.passes for output in done.outputs):
            total.rounds += output.stats.rounds
            total.tokens += output.stats.tokens
            total.proposed = _add(total.proposed, output.stats.proposed)
            total.accepted = _add(total.accepted, output.stats.accepted)
        return total


@dataclass
class Comparison:
    """The whole result. An interrupted one holds the passes that were complete."""

    plan: Plan
    measured: list[Measured]  # plain first; only variants with a complete pass
    interrupted: bool = False

    @property
    def plain(self) -> Measured:
        return self.measured[0]

    def speed_up(self, measured: Measured) -> float:
        return measured.tokens_per_second / self.plain.tokens_per_second

    def num_identical(self, measured: Measured) -> int:
        return len(self.plan.prompts) - len(measured.differences)


Tell = Callable[[str, int, int], None]  # variant, round (-1: warm-up), prompts done


def compare(llm: LLM, plan: Plan, tell: Tell = lambda variant, round, done: None) -> Comparison:
    """Measure. Ctrl-C ends it early with what was measured.

    `llm` should be built with prefix_caching=False: else a variant would find the pages another one computed.
    """
    result = Comparison(plan, [Measured(variant) for variant in plan.variants])
    try:
        for variant in plan.variants:
            _warm_up(llm, plan, variant, tell)
        for round in range(plan.rounds):  # interleaved, so that a machine that slows down slows down all
            for measured in result.measured:
                # A new drafter for every pass: one that remembers other answers (suffix) must not have seen this
                # prompt's answer in its own warm-up or in an earlier round.
                llm.set_drafter(measured.variant.drafter)
                report = partial(tell, measured.variant.name, round)
                report(0)
                measured.passes.append(run_pass(llm, plan, report))
    except KeyboardInterrupt:
        result.interrupted = True
    result.measured = [measured for measured in result.measured if measured.passes]
    find_differences(result, None if result.interrupted else llm)
    return result


def _warm_up(llm: LLM, plan: Plan, variant: Variant, tell: Tell) -> None:
    """A few tokens of the longest prompt: first calls of everything, and the memory they claim, are not counted."""
    tell(variant.name, -1, 0)
    llm.set_drafter(variant.drafter)
    longest = max(plan.prompts, key=lambda prompt: len(prompt.ids))
    few = min(plan.params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    params = replace(plan.params, max_tokens=few, min_tokens=0)
    run_pass(llm, replace(plan, names=["warm-up"], prompts=[longest], params=params), lambda count: None)


def run_pass(llm: LLM, plan: Plan, on_done: Callable[[int], None]) -> Pass:
    """All prompts once, as many at a time as the engine has room for; `on_done` hears how many have ended."""
    outputs: dict[str, CompletionOutput] = {}
    result = Pass(0.0, [])
    start = time.perf_counter()
    ids = [llm.add(prompt, plan.params) for prompt in plan.prompts]
    try:
        while len(outputs) < len(ids):
            updates = llm.step()
            if updates:
                round = llm.engine.stats.recent[-1]
                result.draft_seconds += round.draft_seconds
                result.verify_seconds += round.verify_seconds
                result.rest_seconds += round.rest_seconds
            for update in updates:
                if update.finished:
                    outputs[update.sequence.request_id] = completion(update.sequence)
                    on_done(len(outputs))
        result.seconds = time.perf_counter() - start
    finally:
        for request_id in ids:
            llm.abort(request_id)
    result.outputs = [outputs[request_id] for request_id in ids]
    for name, output in zip(plan.names, result.outputs):
        if output.error is not None:
            raise PacelineError(f"prompt {name!r} failed: {output.error}")
    return result


def find_differences(result: Comparison, llm: LLM | None) -> None:
    """Compare every pass of every variant, plain's own repetitions included, with the first plain one.

    With an `llm`, the margin at each difference is recomputed. Token for token only holds what every variant says
    under the `exact` rule, so with another rule every answer may differ.
    """
    if not result.measured or result.plain.variant.name != PLAIN:
        return
    reference = result.plain.passes[0].outputs
    for measured in result.measured:
        measured.differences = []
        for number, plain in enumerate(reference):
            found = _first_difference(number, plain, measured.passes)
            if found is not None:
                margin = None if llm is None else find_margin(llm, result.plan, found, plain.token_ids)
                measured.differences.append(replace(found, margin=margin))


def _first_difference(number: int, plain: CompletionOutput, passes: list[Pass]) -> Difference | None:
    """The first pass in which a prompt's answer is not the plain one."""
    for round, done in enumerate(passes):
        pairs = zip_longest(plain.token_ids, done.outputs[number].token_ids)
        for position, (expected, got) in enumerate(pairs):
            if expected != got:
                return Difference(number, round, position, expected, got, None)
    return None


def find_margin(llm: LLM, plan: Plan, difference: Difference, plain: list[int]) -> float | None:
    """How far apart the two likeliest tokens are after the common prefix: next to nothing is a rounding tie.

    None for sampled text, where noise took part in the choice and log-probabilities alone say little.
    """
    if not plan.params.greedy:
        return None
    llm.set_drafter(None)
    prefix = [*plan.prompts[difference.prompt].ids, *plain[: difference.position]]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, ignore_eos=True)
    output = llm.generate([prefix], params)[0].outputs[0]
    if not output.logprobs:
        return None
    first, second = sorted((entry.logprob for entry in output.logprobs[0].values()), reverse=True)[:2]
    return first - second


def _add(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
