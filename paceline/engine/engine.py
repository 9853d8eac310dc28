"""The loop. Read `step`, `_launch` and `_commit`: they are the eight lines of the design.

`step()` launches one round and returns what the rounds that completed produced, possibly nothing. Callers assume
nothing else. Here a round completes at once; where rounds overlap, sequences in flight are simply not scheduled again
and their slots and pages stay theirs until the round has been committed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters import tree
from paceline.drafters.base import Drafter, Observation, Taps, Target
from paceline.drafters.tree import Proposal
from paceline.engine.budget import Budget, FixedBudget, Load
from paceline.engine.commit import (
    append_tokens,
    keep_accepted,
    logprobs_of,
    provenance_of,
    sequences_before,
    shape_of,
    tails_of,
)
from paceline.engine.context import DraftContext
from paceline.engine.round import (
    Drafts,
    PromptRows,
    Round,
    Times,
    histories,
    order_work,
    pad_proposal,
    places,
    sampled_rows,
    undrafted,
)
from paceline.engine.runner import Forwarded, Runner
from paceline.engine.scheduler import Planned, Scheduler
from paceline.engine.sequence import Sequence
from paceline.engine.stats import EngineStats, RoundRecord
from paceline.errors import OptionError
from paceline.models.base import Model
from paceline.models.batch import Batch, Work, pack
from paceline.sampling.processors import process, untouched
from paceline.sampling.state import SamplerState
from paceline.sampling.verify import Decision, Followed, Judged, Verdict, check_acceptance, follow, verify


@dataclass(frozen=True)
class Update:
    """What a completed round brought one sequence."""

    sequence: Sequence
    tokens: list[int]
    text: str
    finished: bool


class Engine:
    def __init__(self, target: Target, cache: KVCache, table: Slots, scheduler: Scheduler, acceptance: str) -> None:
        model: Model = target.model
        self.target, self.cache, self.table, self.scheduler = target, cache, table, scheduler
        self.acceptance = check_acceptance(acceptance)
        self.runner = Runner(model, cache)
        self.state = SamplerState(table, model.config.vocab_size, target.device)
        self.stats = EngineStats()
        self.drafter: Drafter | None = None
        self.budget: Budget = FixedBudget(0)
        self._in_flight: deque[Round] = deque()
        self._untouched: set[int] = set()  # slots whose request takes the likeliest token as it is
        self._held: list[Update] = []  # of rounds that had to be read between two steps
        self.end_ids = frozenset(model.config.eos_ids)
        scheduler.on_enter, scheduler.on_leave = self._enter, self._leave

    # 1 add

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; its pages come back when no round uses them any more."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = "abort"
        sequence.aborted = True
        if not sequence.in_flight:
            self.scheduler.leave(sequence)

    @torch.inference_mode()
    def set_drafter(self, drafter: Drafter | None, budget: Budget | None = None) -> None:
        """Turn speculation on, off or over to another drafter, on a live engine."""
        if drafter is not None and drafter.trees and self.acceptance == "block":
            raise OptionError(f"acceptance='block' judges chains, but the drafter {drafter.name!r} proposes trees")
        while self._in_flight:
            self._held += self._commit(self._in_flight.popleft())
        if drafter is not None:
            drafter.attach(self.target, self.cache)
        self.cache.tails = None  # what was kept belonged to another drafter
        self.drafter = drafter
        self.budget = budget or FixedBudget(drafter.max_nodes if drafter is not None else 0)

    @property
    def has_work(self) -> bool:
        return bool(self._held or self._in_flight or self.scheduler.waiting or self.scheduler.running)

    # 2 … 8

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Launch one round; return what completed rounds produced."""
        round = self._launch()
        if round is not None:
            self._in_flight.append(round)
        updates, self._held = self._held, []
        while self._in_flight and self._arrived(launched=round is not None):
            updates += self._commit(self._in_flight.popleft())
        return updates

    def _arrived(self, launched: bool) -> bool:
        """Whether the oldest round in flight can be read. Always, where the host waits for it."""
        return True

    def _launch(self) -> Round | None:
        times = Times(start=time.perf_counter())
        planned = self.scheduler.schedule(self._node_limit())
        if not planned:
            return None
        try:
            return self._run(planned, times)
        except BaseException:  # leave nothing in flight: who asked for these sequences may abort them now
            for sequence, _ in planned:
                sequence.in_flight = False
            raise

    def _run(self, planned: list[Planned], times: Times) -> Round:
        """Propose, pack, forward, verify."""
        self.table.flush()
        sequences, work, num_drafting, num_sampling = order_work(planned)
        slots = [item.slot for item in work]
        times.before_draft = time.perf_counter()
        proposal = self._propose(work[:num_drafting], num_sampling)
        sizes = proposal.sizes.tolist() + [0] * (len(work) - num_sampling)
        times.drafted = time.perf_counter()
        work = [Work(item.slot, item.start, item.count, size) for item, size in zip(work, sizes)]
        paths = None if proposal.chain else tree.paths(proposal.parents)
        batch = pack(work, self.table, self.cache.pool.block_size, (proposal.tokens, paths))
        prompt_rows, extra = self._prompt_rows(sequences, batch)
        rows = torch.tensor(sampled_rows(work[:num_sampling]) + extra, dtype=torch.int64).to(self.target.device)
        taps = self.drafter.taps if self.drafter is not None else Taps()
        out = self.runner.forward(batch, taps, rows)
        drafts = Drafts(proposal, paths, sizes[:num_sampling], slots[:num_sampling])
        verdict = self._verify(drafts, batch, rows, out) if num_sampling else None
        return Round(
            sequences, work, num_sampling, proposal, sizes, batch, out.logits, out.tapped, verdict, times, prompt_rows
        )

    def _verify(self, drafts: Drafts, batch: Batch, rows: Tensor, out: Forwarded) -> Verdict | Followed:
        if out.best is not None and self._untouched.issuperset(drafts.slots):
            return follow(drafts.proposal, drafts.sizes, out.best.tolist())
        index, owners = places(drafts.sizes, self.target.device)
        sampled = owners.shape[1]  # the rows behind them are wanted for prompt logprobs
        history = histories(drafts, owners, batch, rows[:sampled])
        logits = process(out.logits[:sampled], history, self.state)
        return verify(Judged(drafts.proposal, logits, history, index, self.state), self.acceptance)

    def _node_limit(self) -> Callable[[Sequence], int]:
        """The budget, cut by what the request allows and by its room: the last token is the target's own."""
        load = Load(len(self.scheduler.running), len(self.scheduler.waiting))
        budget = self.budget.choose(load, self.stats)

        def limit(sequence: Sequence) -> int:
            asked = sequence.params.max_draft_tokens
            return max(0, min(budget, budget if asked is None else asked, sequence.room - 1))

        return limit

    def _enter(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        (self._untouched.add if untouched(sequence.params) else self._untouched.discard)(sequence.slot)
        self.state.set(sequence.slot, sequence.params, sequence.words, sequence.seed, sequence.index)

    def _leave(self, sequence: Sequence) -> None:
        if self.drafter is not None and sequence.slot is not None:
            self.drafter.forget([sequence.slot])

    def _propose(self, work: list[Work], count: int) -> Proposal:
        """Trees for the drafting sequences, and empty ones for the others of the `count` that sample."""
        if self.drafter is None or not work:
            return undrafted(count, self.target.device)
        slots, budgets = [item.slot for item in work], [item.num_nodes for item in work]
        context = DraftContext(slots, budgets, self.table, self.state, self.acceptance)
        return pad_proposal(self.drafter.propose(context).limited(context.budgets), count)

    def _prompt_rows(self, sequences: list[Sequence], batch: Batch) -> tuple[list[PromptRows], list[int]]:
        """Rows whose raw logits a request wants: every prompt position but the last predicts a prompt token."""
        wanted: list[PromptRows] = []
        rows: list[int] = []
        for sequence, span in zip(sequences, batch.layout.spans):
            if sequence.wants_prompt_logprobs:
                start = sequence.num_computed
                count = min(span.num_rows, sequence.prompt_length - 1 - start)
                wanted.append((sequence, start, max(count, 0)))
                rows += range(span.row, span.row + max(count, 0))
        return wanted, rows

    # 7 commit, 8 emit

    def _commit(self, round: Round) -> list[Update]:
        """The only place where lengths change."""
        decisions = round.read()
        round.times.read = time.perf_counter()
        keep_accepted(round, decisions, self.runner)
        self._read_prompt_logprobs(round)
        depths, parents, origins = shape_of(round)
        alive: list[tuple[int, Sequence, list[int]]] = []
        for number, (sequence, work, decision) in enumerate(zip(round.sequences, round.work, decisions)):
            sequence.in_flight = False
            if sequence.aborted:
                self.scheduler.leave(sequence)
                continue
            kept = append_tokens(sequence, decision.tokens, self.end_ids)
            self._read_logprobs(round, number, decision, kept)
            if number < round.num_sampling:
                own = origins[number] if origins is not None else None
                told = provenance_of(round.proposal.names, decision, parents[number], own, sequence.stats.rounds)
                sequence.provenance += told[: len(kept)]
                sequence.stats.count(depths[number], min(len(decision.nodes), len(kept)), len(kept))
            assert sequence.slot is not None
            self.table.append(sequence.slot, kept)
            sequence.num_computed = min(work.start + work.count + len(decision.nodes), len(sequence.tokens))
            self.scheduler.publish(sequence)
            alive.append((number, sequence, kept))
        self._observe(round, decisions, [(number, sequence) for number, sequence, _ in alive])
        updates = [self._emit(sequence, kept) for _, sequence, kept in alive]
        self._record(round, decisions, alive)
        return updates

    def _observe(self, round: Round, decisions: list[Decision], alive: list[tuple[int, Sequence]]) -> None:
        """Tell the drafter what became permanent, and keep the tapped states at the end of every full page."""
        drafter = self.drafter
        if drafter is None or not alive:
            return
        self.table.flush()
        starts = [round.work[number].start for number, _ in alive]
        counts = [sequence.num_computed - start for (_, sequence), start in zip(alive, starts)]
        slots = [round.work[number].slot for number, _ in alive]
        seen = Observation(slots, starts, counts, self.table)
        if round.tapped is not None:
            rows = [
                row
                for (number, _), n in zip(alive, counts)
                for row in round.rows_of(number, decisions[number].nodes)[:n]
            ]
            seen.states = round.tapped[torch.tensor(rows, dtype=torch.int64).to(self.target.device)]
            if self.cache.tails is None:
                self.cache.keep_tails(seen.states.shape[1], seen.states.dtype)
            sequences = [sequence for _, sequence in alive]
            seen.before = self.cache.read_tails(sequences_before(sequences, starts, self.cache.pool.block_size))
            self.cache.write_tails(*tails_of(sequences, starts, counts, self.cache.pool.block_size), seen.states)
        if drafter.taps.node_logits:
            seen.node_logits = [round.logits_of(number) for number, _ in alive]
        drafter.observe(seen)

    def _emit(self, sequence: Sequence, kept: list[int]) -> Update:
        finished = sequence.finish_reason is not None
        if finished:
            self.scheduler.leave(sequence)
        return Update(sequence, kept, sequence.detokenizer.take(), finished)

    def _read_logprobs(self, round: Round, number: int, decision: Decision, kept: list[int]) -> None:
        sequence = round.sequences[number]
        if sequence.params.logprobs is None or not kept:
            return
        rows = round.logits_of(number)[[0, *(1 + node for node in decision.nodes)][: len(kept)]]
        sequence.logprobs += logprobs_of(rows, kept, sequence.params.logprobs, self.target.tokenizer)

    def _read_prompt_logprobs(self, round: Round) -> None:
        row = round.num_sampled_rows
        for sequence, start, count in round.prompt_rows:
            if start == 0:
                sequence.prompt_logprobs = [None]
            following = sequence.tokens[start + 1 : start + 1 + count]
            logits = round.raw_logits[row : row + count]
            found = logprobs_of(logits, following, sequence.params.prompt_logprobs or 0, self.target.tokenizer)
            sequence.prompt_logprobs += found
            row += count

    def _record(self, round: Round, decisions: list[Decision], alive: list[tuple[int, Sequence, list[int]]]) -> None:
        times = round.times
        draft, verify_ = times.drafted - times.before_draft, times.read - times.drafted
        rest = (time.perf_counter() - times.read) + (times.before_draft - times.start)
        for _, sequence, _ in alive:
            sequence.stats.spend(draft, verify_, rest)
        self.stats.add(
            RoundRecord(
                rows=len(round.batch.ids),
                sequences=len(round.sequences),
                context=sum([span.reach for span in round.batch.layout.spans]),
                proposed=sum(round.sizes),
                accepted=sum([min(len(decisions[number].nodes), len(kept)) for number, _, kept in alive]),
                emitted=sum([len(kept) for _, _, kept in alive]),
                draft_seconds=draft,
                verify_seconds=verify_,
                rest_seconds=rest,
            )
        )


__all__ = ["Engine", "Update"]
