"""A round: what was planned, what is on its way, and what the host reads of it when it has arrived."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.drafters import tree
from paceline.drafters.tree import Proposal
from paceline.engine.account import Drafted, Table
from paceline.engine.sequence import Planned, Sequence
from paceline.kernels.ops import Hidden
from paceline.models.batch import Batch, Shape, Work
from paceline.sampling.state import Rows
from paceline.sampling.verify import Decided, Followed, Verdict


@dataclass
class Times:
    """Moments of a round, in seconds of one clock."""

    start: float
    before_draft: float = 0.0
    drafted: float = 0.0
    read: float = 0.0
    usual: bool = True  # nothing was compiled or captured meanwhile: the seconds say what such a round costs

    def spent(self, last_read: float) -> tuple[float, float, float]:
        """Seconds of drafting, verifying and the rest; a round that waited for another did not cost that."""
        rest = (time.perf_counter() - self.read) + (self.before_draft - self.start)
        return self.drafted - self.before_draft, self.read - max(self.drafted, last_read), rest


@dataclass(eq=False)
class Plan:
    """Who takes part: drafting sequences first, then others that sample, then prompt chunks."""

    sequences: list[Sequence]
    work: list[Work]
    num_drafting: int
    num_sampling: int
    budget: int = 0  # nodes that each might have
    planned: list[Planned] = field(default_factory=list)  # what it was made of
    found: dict[Hashable, Any] = field(default_factory=dict)  # what a runner looked up for it, by what it was asked

    def __post_init__(self) -> None:
        self.slots, self.starts = [item.slot for item in self.work], [item.start for item in self.work]
        self.decodes = all(item.count == 1 for item in self.work)  # everybody does, and nothing else is done

    @classmethod
    def of(cls, planned: list[Planned], budget: int = 0, before: Plan | None = None) -> Plan:
        """before: kept, with all that was found for it, while nothing changes but what the device alone knows."""
        if before is not None and before.budget == budget and before.planned == planned:
            return before
        kinds: tuple[list[Planned], ...] = ([], [], [])
        for sequence, work in planned:
            samples = work.start is None or work.start + work.count == len(sequence.tokens)
            kinds[0 if work.num_nodes else 1 if samples else 2].append((sequence, work))
        ordered = [*kinds[0], *kinds[1], *kinds[2]]
        counts = len(kinds[0]), len(kinds[0]) + len(kinds[1])
        return cls([sequence for sequence, _ in ordered], [work for _, work in ordered], *counts, budget, planned)

    def fit(self, sizes: list[int]) -> None:
        """As many nodes as were proposed for each that samples."""
        for number, size in enumerate(sizes):
            if self.work[number].num_nodes != size:
                self.work[number] = self.work[number]._replace(num_nodes=size)

    def cut(self, most: int) -> None:
        """No more nodes than this for anybody."""
        self.work = [item if item.num_nodes <= most else item._replace(num_nodes=most) for item in self.work]

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each, with as many nodes as were planned."""
        return [item.count + item.num_nodes for item in self.work]

    @cached_property
    def shape(self) -> Shape:
        """As it is in the end: this and `nodes` are asked for when what a drafter hands over is there."""
        return tuple([(item.count, item.num_nodes) for item in self.work])

    @cached_property
    def nodes(self) -> list[int]:
        return [item.num_nodes for item in self.work]

    @cached_property
    def wants_logprobs(self) -> bool:
        return any(one.params.logprobs is not None for one in self.sequences)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return any(one.wants_prompt_logprobs for one, start in zip(self.sequences, self.starts) if start is not None)

    def reaches(self) -> list[int]:
        """For each sequence one more than the furthest line it may touch, before the round is launched."""
        return [
            item.count + item.num_nodes + (one.outlook()[1] - 1 if item.start is None else item.start)
            for one, item in zip(self.sequences, self.work)
        ]

    def launch(self) -> None:
        """From here on these rounds are ahead of what is known of their sequences."""
        for number, (sequence, work) in enumerate(zip(self.sequences, self.work)):
            sequence.ahead.append(1 + work.num_nodes if number < self.num_sampling else 0)
            if work.start is not None:  # else the device knows
                sequence.num_launched = work.start + work.count


PromptRows = tuple[Sequence, int, int]  # a sequence, its first position, how many rows


@dataclass
class Round:
    plan: Plan
    proposal: Proposal  # [num_sampling, N]
    batch: Batch
    out: Hidden  # logits [R, V] of the sampled rows, then of prompt rows asked for
    verdict: Verdict | Followed | None
    times: Times
    prompt_rows: list[PromptRows] = field(default_factory=list)
    sent: Sent | None = None  # on its way to the host; None: the host waits for it when it reads
    stride: int = 0  # logits stand so many rows apart for each sequence; 0: one behind the other

    def read(self) -> tuple[Decided, Drafted]:
        """What was decided, and what had been proposed; sequences beyond those that sampled decide nothing."""
        if self.sent is not None:
            (tokens, nodes), drafted = self._read_sent(self.sent)
        else:
            (tokens, nodes), drafted = self.verdict.read() if self.verdict else ([], []), Drafted.of(self.proposal)
        nothing: list[list[int]] = [[]] * (len(self.plan.sequences) - len(tokens))
        return Decided(tokens + nothing, nodes + nothing), drafted

    def _read_sent(self, sent: Sent) -> tuple[Decided, Drafted]:
        table = sent.read(self.plan.num_sampling)  # a frame may have had room for more
        decided, sizes, *trees = sent.parts
        assert decided is not None and sizes is not None
        above, scratch, origins = (None if part is None else [row[part] for row in table] for part in trees)
        listed = [row[sizes.start] for row in table]
        drafted = Drafted.read(self.proposal.names, listed, above, scratch, origins)
        return Verdict.decided(table, decided.stop), drafted

    def logits_of(self, number: int) -> Tensor:
        """[1+nodes, V] the raw logits of one sampling sequence; none for a prompt chunk."""
        assert self.out.logits is not None
        if number >= self.plan.num_sampling:
            return self.out.logits[:0]
        if self.stride:
            first = number * self.stride
            return self.out.logits[first : first + 1 + self.plan.work[number].num_nodes]
        first, last = self.batch.places.first_sampled[number : number + 2]
        return self.out.logits[first:last]


class Report(NamedTuple):
    """All that the host will read of a round, side by side."""

    table: Tensor  # [B, …]
    parts: tuple[slice | None, ...]  # its columns: decisions, sizes, parents, scratch, origins; None: not there

    @classmethod
    def of(cls, proposal: Proposal, verdict: Verdict) -> Report:
        shape = (None, None) if proposal.chain else (proposal.parents, proposal.scratch)
        parts = [verdict.table(), proposal.sizes[:, None], *shape, proposal.origins]
        ends = itertools.accumulate([0 if part is None else part.shape[1] for part in parts])
        places = tuple([None if part is None else slice(end - part.shape[1], end) for part, end in zip(parts, ends)])
        if verdict.sent is not None:  # kernels laid it out
            return cls(verdict.sent, places)
        return cls(torch.cat([part.long() for part in parts if part is not None], dim=1), places)


class Sent:
    """A report on its way to the host, in one copy. What is launched later is not waited for."""

    def __init__(self, report: Report) -> None:
        self._table, self.parts = report
        self._event: torch.cuda.Event | None = None
        if self._table.device.type == "cuda":
            there, self._table = self._table, torch.empty(self._table.shape, dtype=torch.int64, pin_memory=True)
            self._table.copy_(there, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        elif self._table.device.type == "cpu":
            self._table = self._table.clone()  # a replay writes over it

    def read(self, count: int) -> Table:
        """The first so many rows."""
        if self._event is not None:
            self._event.synchronize()
        return self._table[:count].tolist()


@functools.lru_cache
def undrafted(count: int, device: torch.device) -> Proposal:
    """Empty trees, made once for a number of sequences: nobody writes into a proposal."""
    return Proposal.empty(count, device)


def pad_proposal(proposal: Proposal, batch: int) -> Proposal:
    """Empty trees for the sequences that sample without drafting; they stand behind the others."""
    extra = batch - len(proposal.sizes)
    if extra == 0:
        return proposal

    def rows(tensor: Tensor, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((extra, *tensor.shape[1:]), value)])

    return replace(
        proposal,
        tokens=rows(proposal.tokens, 0),
        above=None if proposal.above is None else rows(proposal.above, tree.PADDING),
        sizes=rows(proposal.sizes, 0),
        probs=None if proposal.probs is None else rows(proposal.probs, 0),
        scratch=None if proposal.scratch is None else rows(proposal.scratch, 0),
        origins=None if proposal.origins is None else rows(proposal.origins, 0),
    )


def histories(proposal: Proposal, paths: Tensor | None, batch: Batch, slots: list[int]) -> Rows:
    """Each sampled row with the drafted tokens on its own path."""
    places, layout = batch.places, batch.layout
    rows, owner, node = places.sampled, places.sampled_owner, places.sampled_node
    if proposal.num_nodes == 0:
        path = torch.zeros(len(rows), 0, dtype=torch.int64, device=rows.device)
    elif paths is None:
        depth = torch.arange(proposal.num_nodes, device=rows.device)
        path = torch.where(depth <= node[:, None], proposal.tokens[owner], -1)
    else:
        nodes = torch.where((node >= 0)[:, None], paths[owner, node.clamp(min=0)], tree.PADDING)
        path = torch.where(nodes >= 0, proposal.tokens[owner].gather(1, nodes.clamp(min=0)), -1)
    return Rows(layout.slots[rows], slots, layout.positions[rows], path)
