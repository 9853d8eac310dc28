"""Rounds on a device of its own, whose tables are apart from the host's.

A round is packed by a frame (`models/frame.py`): nothing in it is sent to the device or read from it, so that rounds
can be ahead of the host, and can be captured (`replaying.py`).
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters.base import Observation, Target, is_mixed
from paceline.drafters.tree import Proposal
from paceline.engine.context import DraftContext, Given
from paceline.engine.round import Plan, PromptRows, Report, Round, Sent, Times, histories, pad_proposal, undrafted
from paceline.engine.runner import Runner, wanted_rows
from paceline.kernels.ops import Hidden, see_windows
from paceline.models.batch import Batch, Nodes, Static, pack_rows, places_of
from paceline.models.frame import Frame, FrameInput, Size
from paceline.sampling.processors import process
from paceline.sampling.rules import Rule
from paceline.sampling.verify import Judged, Verdict, follow_there, verify


class Asked(NamedTuple):
    """What a round is to do."""

    slots: list[int]  # of those that sample, the null slot behind them: their parameters say which stages run
    drafts: bool  # the drafter proposes
    new: bool  # somebody is seen for the first time, and not from its beginning
    handed: Proposal | None = None  # what a drafter on the host proposes
    more: Tensor | None = None  # rows whose logits are wanted beside the sampled ones
    open: bool = False  # what comes behind the forward asks the host, and is launched every time


class Outcome(NamedTuple):
    """What a round made, on the device."""

    proposal: Proposal
    batch: Batch
    out: Hidden
    verdict: Verdict | None = None
    report: Report | None = None
    paths: Tensor | None = None  # of the proposal's nodes


class DeviceRunner(Runner):
    def __init__(self, target: Target, cache: KVCache, table: Slots, rule: Rule) -> None:
        table.rounds = target.model.ops.rounds
        super().__init__(target, cache, table, rule)

    def run(self, plan: Plan, times: Times) -> Round:
        """Launch all of a round; what the host will read of it is on its way."""
        self.table.flush()
        times.before_draft = time.perf_counter()
        handed = self._hand(plan)
        times.drafted = time.perf_counter()
        new = self.meet(plan) if self.taps.hidden else [False] * len(plan.work)
        return self._launch(plan, handed, new, times)

    def _hand(self, plan: Plan) -> Proposal | None:
        """What a drafter on the host proposes for those that sample."""
        if self.drafter is None or self.drafter.on_device or not plan.num_drafting:
            return None
        work = plan.work[: plan.num_drafting]
        slots, budgets = [item.slot for item in work], [item.num_nodes for item in work]
        context = DraftContext(slots, budgets, self.state, self.rule)
        proposal = context.cut(self.drafter.propose(context)).narrow(max(budgets))
        plan.cut(proposal.num_nodes)
        if not proposal.num_nodes:  # a round like any without drafts
            plan.num_drafting = 0
            return None
        return pad_proposal(proposal, plan.num_sampling)

    def _fill(self, frame: Frame, plan: Plan, new: list[bool]) -> None:
        given = FrameInput(plan.slots, plan.starts, plan.nodes, new)
        frame.fill(plan.shape, plan.num_sampling, given, self.table)

    def _launch(self, plan: Plan, handed: Proposal | None, new: list[bool], times: Times) -> Round:
        frame = Frame(Size.exact(plan.shape, plan.num_sampling), self.table.device)
        own = places_of(plan.shape, plan.num_sampling, frame.num_nodes, self.table.device)
        frame.own_spans = own.spans(plan.reaches())
        self._fill(frame, plan, new)
        prompt_rows: list[PromptRows] = []
        more = None
        if plan.wants_prompt_logprobs:
            prompt_rows, rows = wanted_rows(plan, own.first_rows)
            more = torch.tensor(rows, dtype=torch.int64).to(self.table.device)
        slots, drafts = plan.slots[: plan.num_sampling], bool(plan.num_drafting)
        made = self.compute(frame, Asked(slots, drafts, any(new), handed, more))
        return self._round(plan, made, made.out, times, prompt_rows)

    def _round(
        self, plan: Plan, made: Outcome, out: Hidden, times: Times, prompt_rows: list[PromptRows] | None = None
    ) -> Round:
        verdict, report = (made.verdict, made.report) if plan.num_sampling else (None, None)
        sent, stride = None if report is None else Sent(report), 1 + made.batch.places.num_nodes
        return Round(plan, made.proposal, made.batch, out, verdict, times, prompt_rows or [], sent, stride)

    def compute(self, frame: Frame, asked: Asked) -> Outcome:
        """Propose, pack, forward, verify, commit and observe. Nothing is sent to the device, and nothing read."""
        return self.conclude(self.prepare(frame, asked), asked)

    def prepare(self, frame: Frame, asked: Asked) -> Outcome:
        table, proposal = self.table, self._draft(frame, asked)
        paths = proposal.paths(table.rounds)
        given = Static([], Nodes(proposal.tokens, proposal.sizes, paths), newest=True)
        batch = pack_rows(frame, frame.slots, frame.starts, table, self.cache.pool.block_size, given)
        if table.windowed is not None:
            see_windows(batch.layout, table.windowed.table.tensor)
        rows = frame.sampled if asked.more is None else torch.cat([frame.sampled, asked.more])
        best = self._follows(asked.slots) and not self.state.any_sampled(asked.slots)
        out = self.target.model.forward(batch, self.cache.layers, self.taps.hidden, rows, best)
        return Outcome(proposal, batch, out, paths=paths)

    def conclude(self, made: Outcome, asked: Asked) -> Outcome:
        frame = made.batch.places
        assert isinstance(frame, Frame)
        if frame.num_sampling:
            verdict = self._decide(made.proposal, made.paths, made.batch, made.out, asked.slots)
            if not verdict.committed:
                self.table.commit(frame.slots[: frame.num_sampling], verdict.tokens, verdict.lengths + 1)
            made = made._replace(verdict=verdict, report=Report.of(made.proposal, verdict))
        self._settle_frame(made, asked.new)
        return made

    def _draft(self, frame: Frame, asked: Asked) -> Proposal:
        if asked.handed is not None:
            return asked.handed
        if self.drafter is None or not asked.drafts:
            return undrafted(frame.num_sampling, self.table.device)
        budgets = [frame.num_nodes] * frame.num_sampling
        context = DraftContext(asked.slots, budgets, self.state, self.rule, Given(frame.drafting, frame.budgets))
        return context.cut(self.drafter.propose(context)).widen(frame.num_nodes)

    def _decide(self, proposal: Proposal, paths: Tensor | None, batch: Batch, out: Hidden, slots: list[int]) -> Verdict:
        assert out.logits is not None
        width, index = proposal.num_nodes, batch.places.index
        if width != batch.places.num_nodes:
            index = index[:, torch.arange(width + 1, device=index.device).clamp(max=index.shape[1] - 1)]
        if self.table.rounds is not None and self._follows(slots):
            return follow_there(proposal, out, batch, index, self.state, slots)
        history = histories(proposal, paths, batch, slots)
        logits = process(out.logits[: len(history.slots)], history, self.state)
        return verify(Judged(proposal, logits, history, index, self.state), self.rule)

    def _settle_frame(self, made: Outcome, new: bool) -> None:
        """What is permanent becomes so for the cache and the drafter."""
        if made.verdict is not None and not made.proposal.chain:
            self._keep_accepted(made.verdict, made.batch)
        if self.listener is None:
            return
        frame = made.batch.places
        assert isinstance(frame, Frame)
        slots = [self.table.null] * frame.size.sequences  # nobody on the device asks for them
        seen = Observation(self.table, made.batch, made.verdict, slots, made.out.tapped, on_device=True)
        if seen.states is not None:
            self.keep_room(seen.states)
            seen.before = self.read_before(made.batch, frame.firsts, frame.new != 0) if new else None
        if self.listener.on_device or is_mixed(self.listener):
            self.tell(self.listener, seen, made.out)
        if seen.states is not None:  # last: what was kept is found once, and the drafter asks for more of it
            self.cache.write_tails(seen.tails, seen.states, self.table.rounds)

    def settle(self, round: Round) -> None:
        """The cache knows, and who drafts on the device; who drafts on the host is told now."""
        if self.listener is not None and not self.listener.on_device:
            parts = (round.batch, round.verdict, round.plan.slots, round.out.tapped)
            self.tell(self.listener, Observation(self.table, *parts, on_device=False), round.out)

    def _moves(self, moved: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Everything: what stays is moved to where nobody looks."""
        return source.flatten(), target.flatten()
