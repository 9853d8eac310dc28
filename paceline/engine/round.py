"""A round on its way: what was launched, what the target said, and the index arithmetic between the two.

Rows of a batch, sequence after sequence:   committed … committed | node node node
Rows whose logits are needed, for each sampling sequence:      ^     ^    ^    ^
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.drafters import tree
from paceline.drafters.tree import Proposal
from paceline.engine.sequence import Sequence
from paceline.models.batch import Batch, Work
from paceline.sampling.state import Rows
from paceline.sampling.verify import Decision, Followed, Verdict


@dataclass
class Times:
    """Moments of a round, in seconds of one clock."""

    start: float
    before_draft: float = 0.0
    drafted: float = 0.0
    read: float = 0.0


PromptRows = tuple[Sequence, int, int]  # a sequence, its first position, how many rows


@dataclass
class Round:
    sequences: list[Sequence]  # all that take part; the first num_sampling of them sample a token
    work: list[Work]
    num_sampling: int
    proposal: Proposal  # [num_sampling, N]
    sizes: list[int]
    batch: Batch
    raw_logits: Tensor  # [R, V] of the sampled rows, then of prompt rows asked for
    tapped: Tensor | None
    verdict: Verdict | Followed | None
    times: Times
    prompt_rows: list[PromptRows] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._firsts = list(accumulate((1 + size for size in self.sizes[: self.num_sampling]), initial=0))

    @property
    def num_sampled_rows(self) -> int:
        return self._firsts[-1]

    def read(self) -> list[Decision]:
        """What was decided; sequences beyond those that sampled decide nothing."""
        decided = self.verdict.read() if self.verdict is not None else []
        return decided + [Decision([], []) for _ in self.sequences[len(decided) :]]

    def logits_of(self, number: int) -> Tensor:
        """[1+nodes, V] the raw logits of one sampling sequence; none for a prompt chunk."""
        if number >= self.num_sampling:
            return self.raw_logits[:0]
        first = self._firsts[number]
        return self.raw_logits[first : first + 1 + self.sizes[number]]

    def rows_of(self, number: int, nodes: list[int]) -> list[int]:
        """Rows of the batch that became permanent for a sequence: its committed tokens, then its accepted nodes."""
        first, count = self.batch.layout.spans[number].row, self.work[number].count
        return [*range(first, first + count), *(first + count + node for node in nodes)]


def order_work(planned: list[tuple[Sequence, Work]]) -> tuple[list[Sequence], list[Work], int, int]:
    """Drafting sequences first, then others that sample, then prompt chunks; and how many of the first two kinds."""

    def kind(item: tuple[Sequence, Work]) -> int:
        sequence, work = item
        if work.num_nodes:
            return 0
        return 1 if work.start + work.count == len(sequence.tokens) else 2

    ordered = sorted(planned, key=kind)
    kinds = [kind(item) for item in ordered]
    return [s for s, _ in ordered], [w for _, w in ordered], kinds.count(0), kinds.count(0) + kinds.count(1)


@functools.lru_cache
def undrafted(count: int, device: torch.device) -> Proposal:
    """Empty trees, made once for a number of sequences: nobody writes into a proposal."""
    return Proposal.empty(count, device)


def pad_proposal(proposal: Proposal, batch: int) -> Proposal:
    """Empty trees for the sequences that sample without drafting; they stand behind the others."""
    extra = batch - len(proposal.sizes)
    if extra == 0:
        return proposal

    def rows(tensor: Tensor | None, value: int) -> Tensor | None:
        if tensor is None:
            return None
        return torch.cat([tensor, tensor.new_full((extra, *tensor.shape[1:]), value)])

    tokens, parents, sizes = rows(proposal.tokens, 0), rows(proposal.parents, tree.PADDING), rows(proposal.sizes, 0)
    assert tokens is not None and parents is not None and sizes is not None
    return Proposal(
        tokens,
        parents,
        sizes,
        proposal.chain,
        rows(proposal.probs, 0),
        rows(proposal.scratch, 0),
        proposal.names,
        rows(proposal.origins, 0),
    )


def sampled_rows(work: list[Work]) -> list[int]:
    """Rows of the batch where the sequences that sample need logits: each newest committed token, then the nodes."""
    rows: list[int] = []
    first = 0
    for item in work:
        end = first + item.count + item.num_nodes
        rows += range(first + item.count - 1, end)
        first = end
    return rows


def places(sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where among the sampled rows each sequence's stand [B, N+1], and each row's sequence and place in it [2, R]."""
    counts = 1 + np.array(sizes, dtype=np.int64)
    firsts = counts.cumsum() - counts
    owner = np.arange(len(sizes)).repeat(counts)
    within = np.arange(len(owner)) - firsts[owner]
    index = firsts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    flat = torch.from_numpy(np.concatenate([index.ravel(), owner, within])).to(device, non_blocking=True)
    return flat[: index.size].view(index.shape), flat[index.size :].view(2, len(owner))


@dataclass
class Drafts:
    """What is judged: the proposal with its trees' paths, and on the host its sizes and its sequences' slots."""

    proposal: Proposal
    paths: Tensor | None  # [B, N, D]; None: chains
    sizes: list[int]
    slots: list[int]


def histories(drafts: Drafts, owners: Tensor, batch: Batch, rows: Tensor) -> Rows:
    """Each sampled row with the drafted tokens on its own path."""
    owner, within = owners
    layout, proposal, paths = batch.layout, drafts.proposal, drafts.paths
    if proposal.num_nodes == 0:
        path = torch.zeros(len(rows), 0, dtype=torch.int64, device=rows.device)
    elif paths is None:
        depth = torch.arange(proposal.num_nodes, device=rows.device)
        path = torch.where(depth < within[:, None], proposal.tokens[owner], -1)
    else:
        nodes = torch.where((within > 0)[:, None], paths[owner, (within - 1).clamp(min=0)], tree.PADDING)
        path = torch.where(nodes >= 0, proposal.tokens[owner].gather(1, nodes.clamp(min=0)), -1)
    return Rows(layout.slots[rows], drafts.slots, layout.positions[rows], path)
