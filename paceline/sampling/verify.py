"""What the target decides about a proposal. Pure: tensors in, a Verdict out, nothing read from the device on the way.

How a rule decides stands in `rules`. Greedy requests take the likeliest token under every rule. One pass over the
nodes in their order serves all trees, because parents come before children and siblings stand in the order they are to
be tried. A proposal may be wider than any of its sizes: the nodes past them are padding and never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.cpu.chain import pick
from paceline.kernels.rounds import Rounds, Trees
from paceline.sampling import noise
from paceline.sampling.state import Rows, SamplerState

if TYPE_CHECKING:
    from paceline.drafters.tree import Proposal
    from paceline.kernels.ops import Hidden
    from paceline.models.batch import Batch
    from paceline.sampling.rules import Rule


class Decided(NamedTuple):
    """A verdict on the host, by sequence."""

    tokens: list[list[int]]  # accepted, then one more; -1: none could be sampled
    nodes: list[list[int]]  # accepted


@dataclass
class Verdict:
    """D is the number of nodes a sequence may have; accepted nodes come first, the final token after them."""

    tokens: Tensor  # [B, D+1] accepted tokens, then one more; -1 beyond, and -1 as the last one if none can be sampled
    nodes: Tensor  # [B, D] accepted nodes by depth; -1 beyond
    lengths: Tensor  # [B] how many were accepted
    sent: Tensor | None = None  # [B, W] all that a `Report` has, where kernels laid it out
    committed: bool = False  # by whoever reached it
    deepest: int | None = None  # no more nodes are accepted than that; None: D

    @classmethod
    def of(cls, sent: Tensor, nodes: int, committed: bool, deepest: int | None) -> Verdict:
        """What kernels laid out for proposals of so many nodes."""
        tokens, chosen = sent[:, : nodes + 1], sent[:, nodes + 1 : 2 * nodes + 1]
        return cls(tokens, chosen, sent[:, 2 * nodes + 1], sent, committed, deepest)

    def read(self) -> Decided:
        return self.decided(self.table().tolist(), 2 * self.nodes.shape[1] + 2)

    def table(self) -> Tensor:
        """[B, 2D+2] all of it, to be sent to the host at once."""
        if self.sent is not None:
            return self.sent[:, : 2 * self.nodes.shape[1] + 2]
        return torch.cat([self.tokens, self.nodes, self.lengths[:, None]], dim=1)

    @staticmethod
    def decided(table: list[list[int]], width: int) -> Decided:
        """What `table` says, on the host; rows may be longer than it is wide."""
        half, last = width // 2, width - 1
        if half == 1:  # nothing was drafted
            return Decided([row[:1] for row in table], [[]] * len(table))
        return Decided([row[: row[last] + 1] for row in table], [row[half : half + row[last]] for row in table])


@dataclass
class Followed:
    """A verdict that was reached on the host."""

    decided: Decided

    def read(self) -> Decided:
        return self.decided

    @property
    def nodes(self) -> Tensor:
        """[B, D] as a verdict has them."""
        accepted = self.decided.nodes
        most = max(map(len, accepted), default=0)
        listed = [nodes + [-1] * (most - len(nodes)) for nodes in accepted]
        return torch.tensor(listed, dtype=torch.int64).view(len(listed), most)


def path_of(verdict: Verdict | Followed) -> Tensor:
    """[B, deepest] accepted nodes, as far as there may be any."""
    deepest = None if isinstance(verdict, Followed) else verdict.deepest
    return verdict.nodes if deepest is None else verdict.nodes[:, :deepest]


@dataclass
class Judged:
    """Everything a rule looks at. Row index[b, 0] is sequence b's last committed token, index[b, 1+j] its node j.

    N is the proposal's own width. A padding node's index names some row, its token some id: whatever is computed from
    them decides nothing.
    """

    proposal: Proposal
    logits: Tensor  # [R, V] processed
    rows: Rows
    index: Tensor  # [B, N+1]
    state: SamplerState

    @property
    def root_slots(self) -> Tensor:
        return self.rows.slots[self.index[:, 0]]  # [B]

    @property
    def root_positions(self) -> Tensor:
        return self.rows.positions[self.index[:, 0]]  # [B]

    def children(self, node: int, current: Tensor) -> Tensor:
        """[B]: node is a child of where each sequence stands (0 the root, 1+j node j) and may be accepted."""
        here = self.proposal.parents[:, node] + 1 == current
        return here if self.proposal.scratch is None else here & ~self.proposal.scratch[:, node]


def verify(judged: Judged, rule: Rule) -> Verdict:
    """The round's decision under one rule."""
    choices = choose(judged.logits, judged.rows, judged.state)  # [R]
    judge = rule.judge if judged.state.any_sampled(judged.rows.slot_list) and not rule.follows else walk
    if judge is walk and judged.state.table.rounds is not None:
        return _walk_at_once(judged.state.table, judged.proposal, judged.index, choices)
    return judge(judged, choices[judged.index])


def follow_there(
    proposal: Proposal, out: Hidden, batch: Batch, index: Tensor, state: SamplerState, slots: list[int]
) -> Verdict:
    """`follow` where the tables are, by kernels that are there: the verdict on raw logits where temperature and noise
    at most come between them and the tokens, and the rule takes just those. It is committed, too.

    index [B, 1+N]: as in `Judged`."""
    table, layout, places = state.table, batch.layout, batch.places
    assert table.rounds is not None and out.logits is not None
    logits = out.logits[: len(places.sampled)]
    if state.any_sampled(slots):
        keyed = state.keyed()._replace(rows=places.sampled, old=True)
        choices = table.rounds.sample_keys(logits, layout.slots, layout.positions, keyed)
    elif out.keys is not None:
        choices = out.keys
    else:
        choices = table.rounds.best(logits) if out.best is None else out.best
    return _walk_at_once(table, proposal, index, choices, batch.slots)


def follow(proposal: Proposal, sizes: list[int], likeliest: list[int]) -> Followed:
    """The verdict for greedy requests without processors, in plain Python: what every rule says of them.

    `likeliest` holds a token for each sequence's last committed row and then for each of its nodes. Where the kernels
    know it, this costs less than a handful of tensor operations.
    """
    tokens = proposal.tokens.tolist() if proposal.num_nodes else []
    parents = [range(-1, proposal.num_nodes)] * len(sizes) if proposal.chain else proposal.parents.tolist()
    scratch = proposal.scratch.tolist() if proposal.scratch is not None else None
    decided, root = Decided([], []), 0
    for sequence, size in enumerate(sizes):
        said, nodes, current = [], [], -1
        for node in range(size):
            wanted = likeliest[root + 1 + current]
            usable = scratch is None or not scratch[sequence][node]
            if usable and parents[sequence][node] == current and tokens[sequence][node] == wanted:
                said.append(wanted)
                nodes.append(node)
                current = node
        decided.tokens.append([*said, likeliest[root + 1 + current]])
        decided.nodes.append(nodes)
        root += 1 + size
    return Followed(decided)


def argmax(values: Tensor, rounds: Rounds | None = None) -> Tensor:
    """[R, V] → [R]; ties go to the lowest id, a row with nothing above -inf (or with NaN) gives -1."""
    if rounds is not None:
        return rounds.best(values)
    if values.device.type == "cpu":  # one pass, the first of equals
        host = values.numpy()
        found = host.argmax(1)
        found[~(np.take_along_axis(host, found[:, None], 1)[:, 0] > -np.inf)] = -1
        return torch.from_numpy(found)
    best = values.amax(1, keepdim=True)
    ids = torch.arange(values.shape[1], device=values.device)
    winner = torch.where(values == best, ids, values.shape[1]).amin(1)
    return torch.where(best[:, 0] > float("-inf"), winner, -1)


def choose(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    """The token the target samples at every row, [R]."""
    rounds = state.table.rounds
    if not state.any_sampled(rows.slot_list):
        return argmax(logits, rounds)
    if rounds is not None:
        return rounds.sample(logits, rows.slots, rows.positions, state.keyed(divided=True))
    if state.picks:
        return pick(logits, state.picking(rows.slots, rows.positions + 1).processed())
    values = noise.gumbel(state.keys(rows.slots), rows.positions + 1, noise.SAMPLE, logits.shape[1])
    return argmax(torch.where(state.greedy(rows.slots)[:, None], logits, logits + values))


def walk(judged: Judged, choices: Tensor) -> Verdict:
    """Follow the target's choices down the trees."""
    if judged.proposal.chain:
        return _agree(judged, choices)
    accepted, final = _descend(judged, choices)
    return _verdict(judged, accepted, final)


def _walk_at_once(
    table: Slots, proposal: Proposal, index: Tensor, choices: Tensor, slots: Tensor | None = None
) -> Verdict:
    """The same by kernels, for choices [R] as they are, or keys of them; committed to slots [B], if given."""
    assert table.rounds is not None
    parents = proposal.tokens if proposal.chain else proposal.parents  # nobody looks at a chain's
    parts = (proposal.tokens, parents, proposal.sizes, proposal.chain, proposal.scratch, proposal.origins)
    sent = table.rounds.walk(choices, index, Trees(*parts), slots, table.tables)
    return Verdict.of(sent, proposal.num_nodes, slots is not None, proposal.max_depth)


def settle(judged: Judged, choices: Tensor, accepted: Tensor, final: Tensor) -> Verdict:
    """What a rule decided, accepted nodes [B, N] and last tokens [B], as a verdict; greedy requests walk."""
    greedy = judged.state.greedy(judged.root_slots)
    plain, likeliest = _descend(judged, choices)
    return _verdict(judged, torch.where(greedy[:, None], plain, accepted), torch.where(greedy, likeliest, final))


def _agree(judged: Judged, choices: Tensor) -> Verdict:
    """Chains, all nodes at once: the target's choices up to and including the first that differs."""
    proposal = judged.proposal
    places = torch.arange(choices.shape[1], device=choices.device)
    same = (proposal.tokens == choices[:, :-1]) & (places[:-1] < proposal.sizes[:, None])
    if proposal.scratch is not None:
        same = same & ~proposal.scratch
    lengths = same.cumprod(1).sum(1)
    inside = places <= lengths[:, None]
    return Verdict(torch.where(inside, choices, -1), torch.where(inside[:, 1:], places[:-1], -1), lengths)


def _descend(judged: Judged, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Trees, node by node: accepted nodes [B, N] and the target's choice where each sequence ends [B]."""
    tokens = judged.proposal.tokens
    current = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    accepted = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    wanted = choices[:, 0]
    for node in range(judged.proposal.num_nodes):
        hit = judged.children(node, current) & (tokens[:, node] == wanted)
        accepted[:, node] = hit
        current = torch.where(hit, node + 1, current)
        wanted = torch.where(hit, choices[:, node + 1], wanted)
    return accepted, wanted


def _verdict(judged: Judged, accepted: Tensor, final: Tensor) -> Verdict:
    """Accepted nodes in order of depth (their index order), then the final token."""
    lengths = accepted.sum(1)
    nodes = torch.argsort((~accepted).to(torch.int8), dim=1, stable=True)
    places = torch.arange(accepted.shape[1] + 1, device=lengths.device)
    tokens = torch.cat([judged.proposal.tokens.gather(1, nodes), torch.zeros_like(final)[:, None]], dim=1)
    tokens = torch.where(places < lengths[:, None], tokens, torch.where(places == lengths[:, None], final[:, None], -1))
    nodes = torch.where(places[:-1] < lengths[:, None], nodes, -1)
    return Verdict(tokens, nodes, lengths)
