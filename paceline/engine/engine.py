"""The loop. Read `step`, `_launch`, `Runner.run` and `_commit`: they are the eight lines of the design.

`step()` launches one round; what the rounds that completed produced joins `updates`, possibly nothing. Callers assume
nothing else. Up to `depth` rounds stay in flight while the next is launched, for the same sequences too: committed
tokens and lengths live in the slot tables, where a round finds what the one before it decided. On a CPU a round
completes at once and the depth is 0: the same code, nothing ahead.

One caller at a time, and none from inside a step: `paceline.shared` sees to both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter

import torch

from paceline.cache.slots import SPREAD
from paceline.drafters.base import Drafter, Target, may_be_told_late
from paceline.engine.account import Drafted, read_logprobs, read_prompt_logprobs
from paceline.engine.budget import Budget, FixedBudget, MeasuredBudget, make_budget
from paceline.engine.commit import append_tokens, take_back
from paceline.engine.round import Plan, Round, Times
from paceline.engine.runner import Runner
from paceline.engine.scheduler import MustRead, Scheduler
from paceline.engine.sequence import Sequence
from paceline.engine.stats import EngineStats, RoundRecord
from paceline.engine.update import Update
from paceline.errors import EngineError, OptionError, first_line

# What a round brings a sequence that it is not void for: its number in the round, it, tokens kept, nodes accepted.
Told = tuple[int, Sequence, list[int], list[int]]


Pending = tuple[Sequence, Update, int]  # an update to be told, and characters of its sample's text, with this
FEW = 8  # sequences


class Engine:
    def __init__(self, target: Target, runner: Runner, scheduler: Scheduler, depth: int = 0) -> None:
        self.target, self.runner, self.scheduler, self.depth = target, runner, scheduler, depth
        self.cache, self.table, self.rule = runner.cache, runner.table, runner.rule
        self.stats = EngineStats()
        self.budget: Budget = FixedBudget(0)
        self.budget_kind = "fixed"  # of drafters that come without one
        self.end_ids = frozenset(target.model.config.eos_ids)
        self._in_flight: deque[Round] = deque()
        self.updates: deque[Pending] = deque()  # for whoever asked for rounds to take, from the left
        self._ended: list[Sequence] = []  # their slots and pages are still held
        self._last_read, self._most_ahead = 0.0, depth
        self._native = target.model.ops.name == "native"  # what is left to PyTorch is small
        scheduler.on_enter, scheduler.on_leave = self._enter, self._leave

    # 1 add

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    @torch.inference_mode()
    def abort(self, sequence: Sequence, tell: bool = True) -> None:
        """End a sequence now. Its pages come back when no round uses them any more.

        tell: the next step says so; else nobody is there to hear of it, not of what came before either.
        """
        with self._at_work():
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                self._tell_end(sequence)
            if not tell:
                self.updates = deque(item for item in self.updates if item[0] is not sequence)

    @torch.inference_mode()
    def set_drafter(self, drafter: Drafter | None, budget: Budget | None = None) -> None:
        """Turn speculation on, off or over to another drafter, on a live engine."""
        if drafter is not None and drafter.trees and self.rule.chains_only:
            raise OptionError(
                f"acceptance={self.rule.name!r} judges chains, but the drafter {drafter.name!r} proposes trees"
            )
        with self._at_work():
            self._read_all()
        if drafter is not None:
            drafter.attach(self.target, self.cache)
        self.cache.tails = None  # what was kept belonged to another drafter
        self.runner.set_drafter(drafter)
        self.scheduler.beyond = int(drafter is not None and bool(drafter.taps.hidden))  # a pair at the newest place
        self.table.spread = SPREAD if drafter is not None and drafter.trees else 0
        self.scheduler.waits = drafter is not None and not drafter.on_device
        self._most_ahead = self.depth if drafter is None or may_be_told_late(drafter) else 0
        most = 0 if drafter is None or self.scheduler.waits else drafter.max_nodes
        self.budget = budget or make_budget(self.budget_kind, drafter, most if self._most_ahead else -1)
        self.stats.watch(drafter.name if drafter is not None and drafter.learned else None)

    @torch.inference_mode()
    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Get ready for the rounds that come first: yields how much is done, and of how much."""
        budget = self.budget if isinstance(self.budget, MeasuredBudget) else None
        yield from self.runner.warm_up(self.scheduler.max_batched_tokens, () if budget is None else budget.arms)
        if budget is not None:
            budget.tell(self.runner.measure_rounds())

    @property
    def drafter(self) -> Drafter | None:
        return self.runner.drafter

    @property
    def has_work(self) -> bool:
        return bool(self.updates or self._in_flight or self.scheduler.waiting or self.scheduler.running)

    # 2 … 8

    @torch.inference_mode()
    def step(self) -> None:
        """Launch one round; what completed rounds produced joins `updates`, where no interrupt loses it."""
        with self._at_work():
            ahead = self._launch()
            while len(self._in_flight) > ahead or (self._in_flight and self._all_ended()):
                self._commit(self._in_flight.popleft())

    def take(self) -> list[Update]:
        """What there is to be told, once."""
        taken, self.updates = self.updates, deque()
        return list(map(itemgetter(1), taken))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Whatever fails inside leaves an engine that can go on. PyTorch has one thread, if there is little for it."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if self._native and len(self.scheduler.running) <= FEW else threads)
        try:
            yield
            self._let_go()
        except BaseException:
            self._recover()
            raise
        finally:
            torch.set_num_threads(threads)

    def _let_go(self) -> None:
        """Slots and pages of ended sequences come back, once no round is ahead of them."""
        ended, self._ended = [one for one in self._ended if not one.ahead], [one for one in self._ended if one.ahead]
        for sequence in ended:
            self.scheduler.leave(sequence)

    def _all_ended(self) -> bool:
        """Whether what is in flight is void, and nothing else is to be done meanwhile."""
        scheduler = self.scheduler
        return not scheduler.waiting and all(sequence.finish_reason is not None for sequence in scheduler.running)

    def _launch(self) -> int:
        """Schedule and run a round; how many may stay in flight."""
        times = Times(start=time.perf_counter())
        most = 0 if self.drafter is None else self.drafter.max_nodes
        budget = min(most, self.budget.choose(len(self.scheduler.running), self.stats))
        try:
            planned = self.scheduler.schedule(budget)
        except MustRead:
            self._read_all()
            planned = self.scheduler.schedule(budget)
        if planned:
            plan = Plan.of(planned, budget, self._in_flight[-1].plan if self._in_flight else None)
            if self.runner.listener is not None:
                self.runner.note(self.runner.listener, plan)
            self._in_flight.append(self.runner.run(plan, times))
            plan.launch()
            for round in self._in_flight if not times.usual else ():
                round.times.usual = False  # it is read that much later
        elif not (self._in_flight or self.updates) and self.has_work:
            raise EngineError(self.scheduler.describe_stall())
        return self._most_ahead if planned and not (self.scheduler.waits and plan.num_drafting) else 0

    # 7 commit, 8 emit

    def _commit(self, round: Round) -> None:
        """The only place where the host's lengths grow. What a finished sequence's later rounds say is void."""
        decided, drafted = round.read()
        round.times.read = time.perf_counter()
        plan, size = round.plan, self.cache.pool.block_size
        if round.prompt_rows:
            read_prompt_logprobs(round, self.target.tokenizer)
        told: list[Told] = []
        for number, (sequence, tokens, nodes) in enumerate(zip(plan.sequences, *decided)):
            del sequence.ahead[0]
            if sequence.finish_reason is not None:
                continue
            kept = append_tokens(sequence, tokens)
            if sequence.params.logprobs is not None and kept:
                read_logprobs(round, number, nodes, kept, self.target.tokenizer)
            if number < plan.num_sampling:
                sequence.provenance += drafted.provenance(number, nodes, sequence.stats.rounds)[: len(kept)]
                # Never the newest token: if a stop ended the text early, what was computed behind it is not shared.
                sequence.num_computed = len(sequence.tokens) - 1
            else:
                sequence.num_computed += plan.work[number].count
            if not sequence.ahead:
                sequence.num_launched = sequence.num_computed
            if sequence.num_computed // size > len(sequence.keys):
                self.scheduler.publish(sequence)
            told.append((number, sequence, kept, nodes if kept is tokens else nodes[: len(kept)]))
        self.table.append([plan.slots[number] for number, _, _, _ in told], [kept for _, _, kept, _ in told])
        self.runner.settle(round)
        seconds = self._record(round, drafted, told)
        for number, sequence, kept, met in told:
            sequence.stats.count(number < plan.num_sampling, len(kept), seconds)
            if number < plan.num_drafting and drafted.depths[number]:
                deepest = min(drafted.depths[number], sequence.max_length - len(sequence.tokens) + len(kept))
                sequence.stats.count_drafts(deepest, len(met))
                if drafted.origins is not None:
                    sequence.stats.credit(drafted.names[drafted.origins[number][0]], deepest)
            self._emit(sequence, kept)
        self._ended += [sequence for _, sequence, _, _ in told if sequence.finish_reason is not None]
        self._let_go()

    def _emit(self, sequence: Sequence, kept: list[int]) -> None:
        first, total, reason = sequence.num_told, len(sequence.tokens) - sequence.prompt_length, sequence.finish_reason
        text = sequence.detokenizer.certain(sequence.chars_told)
        chars = sequence.chars_told + len(text)
        if sequence.watched or reason is not None:
            params, why, error = sequence.params, sequence.stop_reason, sequence.error
            logprobs = sequence.logprobs[first:] if params.logprobs is not None else None
            stats = None if reason is None else replace(sequence.stats)
            prompt = sequence.prompt_logprobs if params.prompt_logprobs is not None and kept and not first else None
            name, index, seed, origins = sequence.request_id, sequence.index, sequence.seed, sequence.provenance[first:]
            update = Update(name, index, kept, total, text, origins, logprobs, seed, reason, why, error, stats, prompt)
            self.updates.append((sequence, update, chars))  # from here on it is told
        sequence.num_told, sequence.chars_told, sequence.end_told = total, chars, reason is not None

    def _tell_end(self, sequence: Sequence) -> None:
        """A sequence that ended between rounds says so, and is let go when it can be."""
        sequence.detokenizer.finish()
        self._emit(sequence, [])
        self._ended.append(sequence)

    def _read_all(self) -> None:
        while self._in_flight:
            self._commit(self._in_flight.popleft())

    def _recover(self) -> None:
        """Something failed, or Ctrl-C: nothing is in flight, and every sequence waits to be computed again."""
        self._in_flight.clear()
        for sequence, update, chars in self.updates:
            sequence.note_told(update.num_tokens, chars, update.finished)
        everyone = list(dict.fromkeys((*self.scheduler.running, *self.scheduler.waiting)))
        for sequence in everyone:
            take_back(sequence)
        self.scheduler.reset()
        for sequence in everyone:
            if sequence.finish_reason is not None and not sequence.end_told:  # aborted, and nobody heard of it yet
                self._tell_end(sequence)
        self._ended.clear()
        self.cache.forget_tails()
        self.runner.met.clear()
        if self.drafter is not None:
            self.drafter.reset()

    def _enter(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        try:
            self.runner.state.set(sequence.slot, sequence.params, sequence.words, sequence.seed, sequence.index)
        except Exception as error:  # its own fault, and nobody else's
            sequence.finish_reason, sequence.error = "error", f"the request cannot be started: {first_line(error)}"
            self._tell_end(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.runner.met.discard(sequence.slot)
            if self.drafter is not None:
                self.drafter.forget([sequence.slot])

    def _record(self, round: Round, drafted: Drafted, told: list[Told]) -> tuple[float, float, float]:
        """Seconds of drafting, verifying and the rest."""
        seconds, self._last_read = round.times.spent(self._last_read), round.times.read
        plan, met = round.plan, tuple([nodes for _, _, _, nodes in told])
        proposed = sum([drafted.sizes[number] for number, _, _, _ in told if number < plan.num_drafting])
        context, emitted = sum([one.num_computed for one in plan.sequences]), sum([len(kept) for _, _, kept, _ in told])
        counts = len(round.batch.ids), len(plan.work), context, proposed, sum(map(len, met)), emitted
        self.stats.add(RoundRecord(*counts, *seconds, plan.budget if round.times.usual and plan.decodes else None, met))
        return seconds
