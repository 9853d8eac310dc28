"""The same prompts, plain and with each drafter: how fast, and whether the text is the same.

Knows the order of a fair measurement and what to count. Prints and draws nothing; must not know the command line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from paceline.bench.differences import Difference, first_difference
from paceline.bench.interval import Cost, Estimate, estimate
from paceline.bench.kept import has_weights, hold, keep_loaded
from paceline.bench.peers import Peer
from paceline.engine.stats import SequenceStats
from paceline.errors import OptionError, PacelineError
from paceline.llm import LLM
from paceline.outputs import CompletionOutput, Gathered
from paceline.params import SamplingParams
from paceline.prompts import Prompt

PLAIN = "plain"
WARM_UP_TOKENS = 8


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
            total.proposed = _add(total.proposed, output.stats.proposed)
            total.accepted = _add(total.accepted, output.stats.accepted)
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


# Measuring

Tell = Callable[[str, int, int], None]  # variant, round (-1: warm-up), prompts done in it


def compare(llm: LLM, plan: Plan, tell: Tell = lambda variant, round, done: None) -> Comparison:
    """Measure. Ctrl-C ends it early with what was measured.

    `llm` should be built with prefix_caching=False: else a variant would find the pages another one computed.
    """
    result = Comparison(plan, [Measured(variant) for variant in plan.variants])
    drafters = keep_loaded([variant.drafter for variant in plan.variants])
    try:
        for variant, drafter in zip(plan.variants, drafters):
            tell(variant.name, -1, 0)
            _warm_up(llm, plan, variant, drafter)
        for round in range(plan.rounds):
            _run_round(llm, result, drafters, round, tell)
    except KeyboardInterrupt:
        result.interrupted = True
    result.measured = [measured for measured in result.measured if measured.passes]
    find_differences(result, None if result.interrupted else llm)
    return result


def _warm_up(llm: LLM, plan: Plan, variant: Variant, drafter: Any) -> None:
    """A few tokens of the longest prompt: first calls of everything, and the memory they claim, are not counted."""
    longest = max(range(len(plan.prompts)), key=lambda number: len(plan.prompts[number].ids))
    few = min(plan.params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    params = replace(plan.params, max_tokens=few, min_tokens=0)
    few_tokens = replace(plan, params=params)
    if not _run_variant(llm, few_tokens, variant, drafter, [longest], lambda count: None).complete:
        raise KeyboardInterrupt


def _run_round(llm: LLM, result: Comparison, drafters: list[Any], round: int, tell: Tell) -> None:
    """Every prompt with every variant in turn, there and back, so that what slows the machine down slows down all.

    Prompts that are answered together stay together, and so do those of a model that is loaded anew for each pass.
    """
    # A new drafter for every pass: one that remembers other answers (suffix) must not have seen this prompt's answer in
    # its own warm-up or in an earlier round.
    held = drafters if any(map(has_weights, drafters)) else [hold(drafter) for drafter in drafters]
    count = len(result.plan.prompts)
    size = 1 if held is not drafters and llm.options.max_num_seqs == 1 else count
    passes = [Pass(0.0, []) for _ in result.measured]
    try:
        for turn, first in enumerate(range(0, count, size)):
            order = list(zip(result.measured, held, passes))
            for measured, drafter, done in order[:: -1 if (turn + round) % 2 else 1]:
                report = partial(tell, measured.variant.name, round)
                report(first)
                numbers, plan = range(first, min(first + size, count)), result.plan
                ready = partial(_add_ready, report, first)
                done.add(_run_variant(llm, plan, measured.variant, drafter, numbers, ready))
                if not done.complete:
                    raise KeyboardInterrupt
    finally:
        for measured, done in zip(result.measured, passes):
            done.complete = len(done.answers) == count
            if done.complete or (done.answers and not measured.passes):
                measured.passes.append(done)


def _add_ready(report: Callable[[int], None], first: int, ready: int) -> None:
    report(first + ready)


def _run_variant(
    llm: LLM, plan: Plan, variant: Variant, drafter: Any, numbers: Sequence[int], on_done: Callable[[int], None]
) -> Pass:
    if variant.peer is not None:
        return _run_peer(variant.peer, llm, plan, numbers, on_done)
    llm.set_drafter(drafter)
    return run_prompts(llm, plan, numbers, on_done)


def _run_peer(peer: Peer, llm: LLM, plan: Plan, numbers: Sequence[int], on_done: Callable[[int], None]) -> Pass:
    """These prompts once, one after the other; its own time is all that is known of a peer."""
    result = Pass(0.0, [])
    ends = [] if plan.params.ignore_eos else sorted(llm.engine.end_ids)
    try:
        for ready, number in enumerate(numbers, start=1):
            ids, start = plan.prompts[number].ids, time.perf_counter()
            most = plan.params.max_tokens or llm.max_model_len
            said = peer.answer(ids, min(most, llm.max_model_len - len(ids)), ends)
            spent = time.perf_counter() - start
            text = "" if llm.tokenizer is None else str(llm.tokenizer.decode(said, skip_special_tokens=True))
            ended = "stop" if said and said[-1] in ends else "length"
            output = CompletionOutput(0, text, said, ended, None, None, 0, SequenceStats(tokens=len(said)), [])
            result.answers.append(Answer(number, output, spent))
            result.seconds += spent
            on_done(ready)
    except KeyboardInterrupt:
        result.complete = False
    return result


def run_prompts(llm: LLM, plan: Plan, numbers: Sequence[int], on_done: Callable[[int], None]) -> Pass:
    """These prompts once, as many at a time as the engine has room for; `on_done` hears how many have ended.

    Ctrl-C ends it with the answers that are ready; what was spent on the others is not counted.
    """
    outputs: dict[str, CompletionOutput] = {}
    result = Pass(0.0, [])
    clock = start = time.perf_counter()
    ids = [llm.add(plan.prompts[number], plan.params) for number in numbers]
    spent = dict.fromkeys(ids, 0.0)
    gathered = {request_id: Gathered() for request_id in ids}
    try:
        while len(outputs) < len(ids):
            updates = llm.step()
            if updates:
                before, clock = clock, time.perf_counter()
                _add_times(result, llm)
            for update in updates:
                spent[update.request_id] += (clock - before) / len(updates)
                output = gathered[update.request_id].add(update)
                if output is not None:
                    outputs[update.request_id] = output
                    on_done(len(outputs))
        result.seconds = time.perf_counter() - start
    except KeyboardInterrupt:
        result.complete = False
        result.seconds = sum(spent[request_id] for request_id in outputs)
    finally:
        for request_id in ids:
            llm.abort(request_id)
    ready = [(number, request_id) for number, request_id in zip(numbers, ids) if request_id in outputs]
    result.answers = [Answer(number, outputs[request_id], spent[request_id]) for number, request_id in ready]
    for answer in result.answers:
        if answer.output.error is not None:
            raise PacelineError(f"prompt {plan.names[answer.prompt]!r} failed: {answer.output.error}")
    return result


def _add_times(result: Pass, llm: LLM) -> None:
    round = llm.engine.stats.recent[-1]
    result.draft_seconds += round.draft_seconds
    result.verify_seconds += round.verify_seconds
    result.rest_seconds += round.rest_seconds


def find_differences(result: Comparison, llm: LLM | None) -> None:
    """Compare every pass of every variant, plain's own repetitions included, with the first plain one.

    With an `llm`, the margin at each difference is recomputed; after Ctrl-C no further ones are. Token for token only
    holds what every variant says under the `exact` rule, so with another rule every answer may differ.
    """
    if not result.measured or result.plain.variant.name != PLAIN:
        return
    reference = result.plain.passes[0].answers
    greedy = result.plan.params.greedy
    for measured in result.measured:
        found = []
        for plain in reference:
            ids = [a.output.token_ids for done in measured.passes for a in done.answers if a.prompt == plain.prompt]
            prompt = result.plan.prompts[plain.prompt]
            asked = llm if greedy else None  # noise took part in sampled text, and margins say little there
            try:
                found.append(first_difference(plain.prompt, plain.output.token_ids, ids, prompt, asked))
            except KeyboardInterrupt:
                result.interrupted, llm = True, None
                found.append(first_difference(plain.prompt, plain.output.token_ids, ids, prompt, None))
        measured.differences = [difference for difference in found if difference is not None]


def _add(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
