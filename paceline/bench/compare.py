"""The same prompts, plain and with each drafter: how fast, and whether the text is the same.

Knows the order of a fair measurement. Prints and draws nothing; must not know the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.bench.differences import first_difference
from paceline.bench.kept import has_weights, hold, keep_loaded
from paceline.bench.measured import PLAIN, Answer, Comparison, Measured, Pass, Plan, Variant
from paceline.bench.peers import Peer
from paceline.engine.stats import SequenceStats
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.outputs import CompletionOutput, Gathered

WARM_UP_TOKENS = 8

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
