"""A round where the host shares the tables: propose, pack, forward, verify, and later settle.

The host's own knowledge is used for shortcuts: sizes, a verdict in plain Python. Where the tables are apart, rounds are
run by `engine/device.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters.base import Before, Drafter, HostRows, Observation, Taps, Target, listens
from paceline.drafters.tree import Proposal
from paceline.engine.budget import Costs
from paceline.engine.context import DraftContext
from paceline.engine.round import Plan, PromptRows, Round, Times, histories, pad_proposal, undrafted
from paceline.kernels.cpu.chain import pick
from paceline.kernels.ops import Hidden, cache_rows, see_windows
from paceline.models.batch import Batch, Nodes, Work, pack
from paceline.sampling.processors import process
from paceline.sampling.rules import Rule
from paceline.sampling.state import SamplerState
from paceline.sampling.verify import Followed, Judged, Verdict, follow, path_of, verify


class Runner:
    def __init__(self, target: Target, cache: KVCache, table: Slots, rule: Rule) -> None:
        self.target, self.cache, self.table, self.rule = target, cache, table, rule
        self.state = SamplerState(table, target.model.config.vocab_size, target.device)
        self.set_drafter(None)

    def set_drafter(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.listener = drafter if listens(drafter) else None  # to whom there is anything to tell
        self.met: set[int] = set()  # slots it has seen

    def warm_up(self, rows: int, arms: Iterable[int] = ()) -> Iterator[tuple[int, int]]:
        """Nothing is captured here."""
        yield from ()

    def measure_rounds(self) -> Costs:
        """Nor timed."""
        return {}

    def note(self, drafter: Drafter, plan: Plan) -> None:
        """What the drafter counts on the host, before a round is run or replayed."""
        drafter.note(HostRows(self.table, plan.slots, plan.starts, plan.sizes, plan.num_drafting))

    def run(self, plan: Plan, times: Times) -> Round:
        """Propose, pack, forward, verify."""
        times.before_draft = time.perf_counter()
        proposal = self._propose(plan)
        times.drafted = time.perf_counter()
        batch, paths = self._pack(plan, proposal)
        if self.table.windowed is not None:
            see_windows(batch.layout, self.table.windowed.table.tensor)
        prompt_rows: list[PromptRows] = []
        rows = batch.places.sampled
        if plan.wants_prompt_logprobs:
            prompt_rows, more = wanted_rows(plan, batch.places.first_rows)
            rows = torch.cat([rows, torch.tensor(more, dtype=torch.int64)])
        out = self.target.model.forward(batch, self.cache.layers, self.taps.hidden, rows)
        verdict = self._verify(plan, proposal, paths, batch, out) if plan.num_sampling else None
        return Round(plan, proposal, batch, out, verdict, times, prompt_rows)

    @property
    def taps(self) -> Taps:
        return self.drafter.taps if self.drafter is not None else Taps()

    def _propose(self, plan: Plan) -> Proposal:
        """Trees for the drafting sequences, and empty ones for the others that sample."""
        if self.drafter is None or not plan.num_drafting:
            return undrafted(plan.num_sampling, self.target.device)
        work = plan.work[: plan.num_drafting]
        budgets = [item.num_nodes for item in work]
        context = DraftContext([item.slot for item in work], budgets, self.state, self.rule)
        proposal = self.drafter.propose(context)
        if any(size > most for size, most in zip(proposal.size_list, budgets)):
            proposal = context.cut(proposal)
        return proposal if plan.num_drafting == plan.num_sampling else pad_proposal(proposal, plan.num_sampling)

    def _pack(self, plan: Plan, proposal: Proposal) -> tuple[Batch, Tensor | None]:
        """The batch, and the drafts' paths. Only nodes that are there get a row."""
        plan.fit(proposal.size_list)
        paths = proposal.paths()
        nodes = Nodes(proposal.tokens, proposal.sizes, paths)
        return pack(plan.work, self.table, self.cache.pool.block_size, nodes, plan.num_sampling), paths

    def _verify(
        self, plan: Plan, proposal: Proposal, paths: Tensor | None, batch: Batch, out: Hidden
    ) -> Verdict | Followed:
        slots = plan.slots[: plan.num_sampling]
        greedy = self.state.tempered.issuperset(slots) and not self.state.any_sampled(slots)
        if greedy and out.best is not None:
            return follow(proposal, [count - 1 for count in batch.places.sampled_counts], out.best.tolist())
        return self._judge(proposal, paths, batch, out, slots)

    def _judge(
        self, proposal: Proposal, paths: Tensor | None, batch: Batch, out: Hidden, slots: list[int]
    ) -> Verdict | Followed:
        assert out.logits is not None
        layout, rows = batch.layout, batch.places.sampled
        if self._follows(slots) and out.best is not None:
            picking = self.state.picking(layout.slots[rows], layout.positions[rows] + 1)
            picked = pick(out.logits[: len(rows)], picking).tolist()
            return follow(proposal, [count - 1 for count in batch.places.sampled_counts], picked)
        history = histories(proposal, paths, batch, slots)
        logits = process(out.logits[: len(history.slots)], history, self.state)
        return verify(Judged(proposal, logits, history, batch.places.index, self.state), self.rule)

    def _follows(self, slots: list[int]) -> bool:
        """Whether the library can pick for all of them, and the rule takes just that."""
        return self.rule.follows and self.state.tempered.issuperset(slots)

    def settle(self, round: Round) -> None:
        """What is permanent becomes so for the cache and the drafter."""
        if round.verdict is not None and not round.proposal.chain:
            self._keep_accepted(round.verdict, round.batch)
        if self.listener is not None:
            self._observe(self.listener, round)

    def _keep_accepted(self, verdict: Verdict | Followed, batch: Batch) -> None:
        """Move the rows of accepted tree nodes to their positions. A chain's are there already."""
        nodes, layout = path_of(verdict), batch.layout
        roots = batch.places.roots
        groups = [(self.cache.layers, layout)]
        if layout.windowed is not None:
            groups = list(zip(self.cache.groups, (layout, layout.windowed)))
        if self.table.rounds is not None:
            for layers, placed in groups if nodes.numel() else ():
                if layers:
                    self.target.model.ops.keep(layers, *self.table.rounds.moves(nodes, roots, placed))
            return
        depth = torch.arange(nodes.shape[1], device=nodes.device)
        moved = (nodes >= 0) & (nodes != depth)
        slots = torch.where(moved, layout.slots[roots][:, None], self.table.null)
        base = layout.positions[roots][:, None] + 1
        lines = [torch.where(moved, base + place, 0) for place in (nodes, depth)]
        for layers, placed in groups:
            source, target = self._moves(moved, *(cache_rows(placed, slots, line) for line in lines))
            if layers and source.numel():
                self.target.model.ops.keep(layers, source, target)

    def _moves(self, moved: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What is to be moved, and where to. The host may look, and so need not move what stays."""
        return source[moved], target[moved]

    def _observe(self, drafter: Drafter, round: Round) -> None:
        """Tell the drafter what became permanent."""
        slots = round.plan.slots
        seen = Observation(self.table, round.batch, round.verdict, slots, round.out.tapped)
        if seen.states is not None:
            self.keep_room(seen.states)
            new = self.meet(round.plan)
            seen.before = self._before(seen.batch, new) if any(new) else None
            if any(_fills_a_page(work, self.cache.pool.block_size) for work in round.plan.work):
                self.cache.write_tails(seen.tails, seen.states)
        self.tell(drafter, seen, round.out)

    def tell(self, drafter: Drafter, seen: Observation, out: Hidden) -> None:
        if drafter.taps.node_logits and seen.verdict is not None:
            assert out.logits is not None
            seen.logits = out.logits[: len(seen.batch.places.sampled)]
        drafter.observe(seen)

    def meet(self, plan: Plan) -> list[bool]:
        """Whom the drafter sees for the first time, and not from its beginning."""
        new = [work.slot not in self.met and work.start != 0 for work in plan.work]
        self.met.update(plan.slots)
        return new

    def keep_room(self, states: Tensor) -> None:
        """For the tapped states at the end of every full page."""
        if self.cache.tails is None:
            self.cache.keep_tails(states.shape[1], states.dtype)

    def _before(self, batch: Batch, new: list[bool]) -> Before:
        """The states in front of sequences that are seen the first time."""
        firsts = torch.tensor(batch.places.first_rows, dtype=torch.int64)
        return self.read_before(batch, firsts, torch.tensor(new))

    def read_before(self, batch: Batch, firsts: Tensor, new: Tensor) -> Before:
        """firsts [B]: each sequence's first row. They were kept only where a page ends in front of it."""
        size, lines = self.cache.pool.block_size, batch.layout.lines[firsts]
        wanted = new & (lines > 0) & (lines % size == 0)
        pages = self.table.pages.tensor[batch.slots, (lines - 1).clamp(min=0) // size]
        states, known = self.cache.read_tails(torch.where(wanted, pages, 0))
        return Before(states, known & wanted, lines)


def wanted_rows(plan: Plan, first_rows: list[int]) -> tuple[list[PromptRows], list[int]]:
    """Who wants raw logits of its prompt, and which rows' they are: every prompt position but the last predicts a
    prompt token."""
    wanted: list[PromptRows] = []
    rows: list[int] = []
    for sequence, work, first in zip(plan.sequences, plan.work, first_rows):
        if work.start is not None and sequence.wants_prompt_logprobs:
            count = max(0, min(work.count, sequence.prompt_length - 1 - work.start))
            wanted.append((sequence, work.start, count))
            rows += range(first, first + count)
    return wanted, rows


def _fills_a_page(work: Work, size: int) -> bool:
    """Whether a row of it may be the last of a page."""
    return work.start is None or (work.start + work.count + work.num_nodes) // size > work.start // size
