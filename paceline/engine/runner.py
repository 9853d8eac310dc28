"""A round where the tables are: propose, pack, forward, verify; also commit and observe, if the host is elsewhere.

Tensor code. Where tables are shared the host's own knowledge is used for shortcuts (sizes, a verdict in plain Python);
where they are apart nothing here waits for the device, so that rounds can be ahead of the host, and captured.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters.base import Before, Drafter, HostRows, Observation, Taps, Target, listens
from paceline.drafters.tree import Proposal
from paceline.engine.context import DraftContext
from paceline.engine.round import Plan, PromptRows, Round, Times, histories, pad_proposal, undrafted
from paceline.kernels.cpu.chain import pick
from paceline.kernels.ops import Hidden, cache_rows, see_windows
from paceline.models.batch import Batch, Nodes, Work, pack, pack_newest
from paceline.sampling.processors import process
from paceline.sampling.rules import Rule
from paceline.sampling.state import SamplerState
from paceline.sampling.verify import Followed, Judged, Verdict, follow, verify


class Runner:
    def __init__(self, target: Target, cache: KVCache, table: Slots, rule: Rule) -> None:
        self.target, self.cache, self.table, self.rule = target, cache, table, rule
        self.state = SamplerState(table, target.model.config.vocab_size, target.device)
        self.set_drafter(None)

    def set_drafter(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.listener = drafter if listens(drafter) else None  # to whom there is anything to tell
        self.met: set[int] = set()  # slots it has seen

    def note(self, drafter: Drafter, plan: Plan) -> None:
        """What the drafter counts on the host, before a round is run or replayed."""
        sizes = [work.count + work.num_nodes for work in plan.work]
        starts = [work.start for work in plan.work]
        drafter.note(HostRows(self.table, plan.slots, starts, sizes, plan.num_drafting))

    def run(self, plan: Plan, times: Times, slots: Tensor | None = None) -> Round:
        """Propose, pack, forward, verify; where the tables are apart, commit and observe there.

        With `slots` [B] given on the device, and work that is wherever the device says, nothing is sent there and
        nothing read from it: the round can be captured.
        """
        if self.table.apart:
            self.table.flush()
        times.before_draft = time.perf_counter()
        proposal = self._propose(plan, slots)
        times.drafted = time.perf_counter()
        batch, paths = self._pack(plan, proposal, slots)
        if self.table.windowed is not None:
            see_windows(batch.layout, self.table.windowed.table.tensor)
        prompt_rows: list[PromptRows] = []
        rows = batch.places.sampled
        if plan.wants_prompt_logprobs:
            prompt_rows, rows = self._prompt_rows(plan, batch)
        taps = self.drafter.taps if self.drafter is not None else Taps()
        out = self.target.model.forward(batch, self.cache.layers, taps.hidden, rows)
        verdict = self._verify(plan, proposal, paths, batch, out) if plan.num_sampling else None
        round = Round(plan, proposal, batch, out, verdict, times, prompt_rows)
        if self.table.apart and verdict is not None:
            assert isinstance(verdict, Verdict)
            self.table.commit(batch.slots[: plan.num_sampling], verdict.tokens, verdict.lengths + 1)
        if self.settles_itself:
            self.settle(round)
        return round

    @property
    def settles_itself(self) -> bool:
        """Whether a round settles where the tables are; else it does when the host has read it."""
        return self.table.apart and (self.drafter is None or self.drafter.on_device)

    def _propose(self, plan: Plan, slots: Tensor | None) -> Proposal:
        """Trees for the drafting sequences, and empty ones for the others that sample."""
        if self.drafter is None or not plan.num_drafting:
            return undrafted(plan.num_sampling, self.target.device)
        work = plan.work[: plan.num_drafting]
        budgets = [item.num_nodes for item in work]
        given = None if slots is None else slots[: plan.num_drafting]
        context = DraftContext([item.slot for item in work], budgets, self.state, self.rule, given)
        proposal = self.drafter.propose(context)
        if self.table.apart or any(size > most for size, most in zip(proposal.size_list, budgets)):
            proposal = proposal.cut(context.make_budgets())  # whatever the drafter did to those it was shown
        return proposal if plan.num_drafting == plan.num_sampling else pad_proposal(proposal, plan.num_sampling)

    def _pack(self, plan: Plan, proposal: Proposal, slots: Tensor | None) -> tuple[Batch, Tensor | None]:
        """The batch, and the drafts' paths. With nothing ahead only nodes that are there get a row."""
        if self.table.apart:
            plan.cut(proposal.num_nodes)
        else:
            plan.fit(proposal.size_list)
        paths = proposal.paths()
        nodes = Nodes(proposal.tokens, proposal.sizes, paths)
        size = self.cache.pool.block_size
        if slots is None:
            return pack(plan.work, self.table, size, nodes, plan.num_sampling), paths
        return pack_newest(plan.work, slots, self.table, size, nodes), paths

    def _verify(
        self, plan: Plan, proposal: Proposal, paths: Tensor | None, batch: Batch, out: Hidden
    ) -> Verdict | Followed:
        slots = plan.slots[: plan.num_sampling]
        greedy = self.state.tempered.issuperset(slots) and not self.state.any_sampled(slots)
        if greedy and out.best is not None and not self.table.apart:
            return follow(proposal, [count - 1 for count in batch.places.sampled_counts], out.best.tolist())
        return self._judge(proposal, paths, batch, out, slots)

    def _judge(
        self, proposal: Proposal, paths: Tensor | None, batch: Batch, out: Hidden, slots: list[int]
    ) -> Verdict | Followed:
        assert out.logits is not None
        layout, rows = batch.layout, batch.places.sampled
        if out.best is not None and self._follows(slots):
            picking = self.state.picking(layout.slots[rows], layout.positions[rows] + 1)
            picked = pick(out.logits[: len(rows)], picking).tolist()
            return follow(proposal, [count - 1 for count in batch.places.sampled_counts], picked)
        history = histories(proposal, paths, batch, slots)
        logits = process(out.logits[: len(history.slots)], history, self.state)
        return verify(Judged(proposal, logits, history, batch.places.index, self.state), self.rule)

    def _follows(self, slots: list[int]) -> bool:
        """Whether the library can pick for all of them, and the rule takes just that."""
        return self.rule.follows and not self.table.apart and self.state.tempered.issuperset(slots)

    def _prompt_rows(self, plan: Plan, batch: Batch) -> tuple[list[PromptRows], Tensor]:
        """Who wants raw logits of its prompt, and all rows that are looked at, those behind the sampled ones: every
        prompt position but the last predicts a prompt token."""
        wanted: list[PromptRows] = []
        rows: list[int] = []
        for number, (sequence, work) in enumerate(zip(plan.sequences, plan.work)):
            if work.start is not None and sequence.wants_prompt_logprobs:
                first = batch.places.first_rows[number]
                count = max(0, min(work.count, sequence.prompt_length - 1 - work.start))
                wanted.append((sequence, work.start, count))
                rows += range(first, first + count)
        sampled = batch.places.sampled
        return wanted, torch.cat([sampled, torch.tensor(rows, dtype=torch.int64).to(sampled.device)])

    def settle(self, round: Round) -> None:
        """What is permanent becomes so for the cache and the drafter."""
        if round.verdict is not None and not round.proposal.chain:
            self._keep_accepted(round.verdict, round.batch)
        if self.listener is not None:
            self._observe(self.listener, round)

    def _keep_accepted(self, verdict: Verdict | Followed, batch: Batch) -> None:
        """Move the rows of accepted tree nodes to their positions. A chain's are there already."""
        nodes, layout = verdict.nodes, batch.layout
        depth = torch.arange(nodes.shape[1], device=nodes.device)
        moved = (nodes >= 0) & (nodes != depth)
        roots = batch.places.sampled[batch.places.index[:, 0]]
        slots = torch.where(moved, layout.slots[roots][:, None], self.table.null)
        base = layout.positions[roots][:, None] + 1
        lines = [torch.where(moved, base + place, 0) for place in (nodes, depth)]
        groups = [(self.cache.layers, layout)]
        if layout.windowed is not None:
            groups = list(zip(self.cache.groups, (layout, layout.windowed)))
        for layers, placed in groups:
            source, target = (cache_rows(placed, slots, line) for line in lines)
            if not self.table.apart:  # where the host may look, it need not move what stays
                source, target = source[moved], target[moved]
            if layers and source.numel():
                self.target.model.ops.keep(layers, source.flatten(), target.flatten())

    def _observe(self, drafter: Drafter, round: Round) -> None:
        """Tell the drafter what became permanent."""
        slots = round.plan.slots
        seen = Observation(self.table, round.batch, round.verdict, slots, round.out.tapped)
        if seen.states is not None:
            seen.before = self._keep_tails(seen, seen.states, round.plan)
        self.met.update(slots)
        if drafter.taps.node_logits and round.verdict is not None:
            assert round.out.logits is not None
            seen.logits = round.out.logits[: len(round.batch.places.sampled)]
        drafter.observe(seen)

    def _keep_tails(self, seen: Observation, states: Tensor, plan: Plan) -> Before | None:
        """Keep the tapped states at the end of every full page; find those in front of who is seen the first time."""
        cache, size, before = self.cache, self.cache.pool.block_size, None
        if cache.tails is None:
            cache.keep_tails(states.shape[1], states.dtype)
        new = [work.slot not in self.met and work.start != 0 for work in plan.work]
        if any(new):
            before = self._before(seen.batch, new)
        if not self.table.apart and not any(_fills_a_page(work, size) for work in plan.work):
            return before
        ends = seen.positions % size == size - 1
        pages = self.table.pages.tensor[seen.slots, seen.positions // size]
        cache.write_tails(torch.where(ends, pages, 0), states)
        return before

    def _before(self, batch: Batch, new: list[bool]) -> Before:
        """The states in front of sequences that are seen the first time: kept only where a page ends there."""
        size, places = self.cache.pool.block_size, batch.places
        firsts = batch.layout.lines[torch.tensor(places.first_rows, dtype=torch.int64).to(batch.slots.device)]
        wanted = torch.tensor(new).to(batch.slots.device) & (firsts > 0) & (firsts % size == 0)
        pages = self.table.pages.tensor[batch.slots, (firsts - 1).clamp(min=0) // size]
        states, known = self.cache.read_tails(torch.where(wanted, pages, 0))
        return Before(states, known & wanted, firsts)


def _fills_a_page(work: Work, size: int) -> bool:
    """Whether a row of it may be the last of a page."""
    return work.start is None or (work.start + work.count + work.num_nodes) // size > work.start // size
