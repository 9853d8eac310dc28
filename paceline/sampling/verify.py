"""What the target decides about a proposal. Pure: tensors in, a Verdict out, nothing read from the device on the way.

    exact       a node is accepted iff it is the token the target samples there with its keyed noise (the default)
    rejection   the papers' rule: accept with probability p/q, else go on with the residual; the same distribution
    block       the same, judging a chain as a whole; never fewer accepted tokens on average
    typical     accept what is likely enough. Lossy: the text's distribution changes

Greedy requests take the likeliest token under every rule. One pass over the nodes in their order serves all trees,
because parents come before children and siblings stand in the order they are to be tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.sampling import noise
from paceline.sampling.state import Rows, SamplerState

if TYPE_CHECKING:
    from paceline.drafters.tree import Proposal

ACCEPTANCE = ("exact", "rejection", "block", "typical")
TYPICAL_THRESHOLD, TYPICAL_ALPHA = 0.09, 0.3  # Medusa's (Cai et al., 2024)


def check_acceptance(name: str) -> str:
    if name not in ACCEPTANCE:
        raise OptionError(f"acceptance={name!r} is not known; allowed: {', '.join(ACCEPTANCE)} (typical is lossy)")
    return name


@dataclass
class Decision:
    """A verdict's part for one sequence, on the host."""

    tokens: list[int]  # accepted, then one more; -1: none could be sampled
    nodes: list[int]  # accepted


@dataclass
class Verdict:
    """D is the number of nodes proposed; accepted nodes come first, the final token after them."""

    tokens: Tensor  # [B, D+1] accepted tokens, then one more; -1 beyond, and -1 as the last one if none can be sampled
    nodes: Tensor  # [B, D] accepted nodes by depth; -1 beyond
    lengths: Tensor  # [B] how many were accepted

    def read(self) -> list[Decision]:
        """One transfer for the whole round."""
        width = self.nodes.shape[1]
        host = torch.cat([self.tokens, self.nodes, self.lengths[:, None]], dim=1).tolist()
        return [Decision(row[: row[-1] + 1], row[width + 1 : width + 1 + row[-1]]) for row in host]


@dataclass
class Followed:
    """A verdict that was reached on the host."""

    decisions: list[Decision]

    def read(self) -> list[Decision]:
        return self.decisions


@dataclass
class Judged:
    """Everything a rule looks at. Row index[b, 0] is sequence b's last committed token, index[b, 1+j] its node j."""

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


def verify(judged: Judged, acceptance: str) -> Verdict:
    """The round's decision under one rule."""
    choices = choose(judged.logits, judged.rows, judged.state)[judged.index]  # [B, N+1]
    if acceptance == "exact" or not judged.state.any_sampled(judged.rows.slot_list):
        if judged.proposal.chain:
            return _agree(judged, choices)
        accepted, current = _walk(judged, choices)
        return _verdict(judged, accepted, choices.gather(1, current[:, None])[:, 0])
    rule = {"rejection": _rejection, "block": _block, "typical": _typical}[acceptance]
    accepted, final = rule(judged, choices)
    greedy = judged.state.greedy(judged.root_slots)
    plain, current = _walk(judged, choices)
    accepted = torch.where(greedy[:, None], plain, accepted)
    final = torch.where(greedy, choices.gather(1, current[:, None])[:, 0], final)
    return _verdict(judged, accepted, final)


def follow(proposal: Proposal, sizes: list[int], likeliest: list[int]) -> Followed:
    """The verdict for greedy requests without processors, in plain Python: what every rule says of them.

    `likeliest` holds a token for each sequence's last committed row and then for each of its nodes. Where the kernels
    know it, this costs less than a handful of tensor operations.
    """
    drafted = proposal.num_nodes > 0
    tokens, parents = (proposal.tokens.tolist(), proposal.parents.tolist()) if drafted else ([], [])
    scratch = proposal.scratch.tolist() if proposal.scratch is not None else None
    decisions, root = [], 0
    for sequence, size in enumerate(sizes):
        said, nodes, current = [], [], -1
        for node in range(size):
            wanted = likeliest[root + 1 + current]
            usable = scratch is None or not scratch[sequence][node]
            if usable and parents[sequence][node] == current and tokens[sequence][node] == wanted:
                said.append(wanted)
                nodes.append(node)
                current = node
        decisions.append(Decision([*said, likeliest[root + 1 + current]], nodes))
        root += 1 + size
    return Followed(decisions)


def argmax(values: Tensor) -> Tensor:
    """[R, V] → [R]; ties go to the lowest id, a row with nothing above -inf (or with NaN) gives -1."""
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
    if not state.any_sampled(rows.slot_list):
        return argmax(logits)
    values = noise.gumbel(state.keys(rows.slots), rows.positions + 1, noise.SAMPLE, logits.shape[1])
    return argmax(torch.where(state.greedy(rows.slots)[:, None], logits, logits + values))


def _agree(judged: Judged, choices: Tensor) -> Verdict:
    """`_walk` over chains, all nodes at once: the target's choices up to and including the first that differs."""
    proposal, most = judged.proposal, choices.shape[1] - 1  # nobody proposed more
    places = torch.arange(most + 1, device=choices.device)
    same = (proposal.tokens[:, :most] == choices[:, :-1]) & (places[:-1] < proposal.sizes[:, None])
    if proposal.scratch is not None:
        same = same & ~proposal.scratch[:, :most]
    lengths = same.cumprod(1).sum(1)
    inside = places <= lengths[:, None]
    return Verdict(torch.where(inside, choices, -1), torch.where(inside[:, 1:], places[:-1], -1), lengths)


def _walk(judged: Judged, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the target's choices down the tree: accepted nodes [B, N] and where each sequence ends [B]."""
    tokens = judged.proposal.tokens
    current = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    accepted = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    for node in range(judged.proposal.num_nodes):
        wanted = choices.gather(1, current[:, None])[:, 0]
        hit = judged.children(node, current) & (tokens[:, node] == wanted)
        accepted[:, node] = hit
        current = torch.where(hit, node + 1, current)
    return accepted, current


def _drawn_from(judged: Judged, node: int, like: Tensor) -> Tensor:
    """[B, V] the distribution node's token was drawn from: a point mass when it was chosen."""
    if judged.proposal.probs is not None:
        return judged.proposal.probs[:, node].to(like.dtype)
    return torch.zeros_like(like).scatter(1, judged.proposal.tokens[:, node, None], 1.0)


def _coin(judged: Judged, node: int, depth: Tensor) -> Tensor:
    """A uniform for this node, keyed also by the committed length and the node: position alone would bias `block`."""
    extra = (judged.root_positions + 1) * 4096 + node
    keys = judged.state.keys(judged.root_slots)
    return noise.uniform(keys, judged.root_positions + depth, noise.ACCEPT, extra)


def _sample(judged: Judged, probabilities: Tensor, positions: Tensor) -> Tensor:
    """One token from each row of [B, V] probabilities, with the residual stream."""
    keys = judged.state.keys(judged.root_slots)
    values = noise.gumbel(keys, positions, noise.RESIDUAL, probabilities.shape[1], judged.root_positions + 1)
    return argmax(torch.log(probabilities).float() + values)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), or p again where nothing is left."""
    rest = (p - q).clamp(min=0)
    mass = rest.sum(1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def _rejection(judged: Judged, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Leviathan et al. and Chen et al., 2023, over trees: siblings drawn with or without replacement, or chosen."""
    p_all = torch.softmax(judged.logits.double(), dim=1)  # [R, V]
    tokens = judged.proposal.tokens
    accepted = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    current = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    depth = torch.ones_like(current)
    p = p_all[judged.index[:, 0]]  # [B, V]
    for node in range(judged.proposal.num_nodes):
        child = judged.children(node, current)
        q = _drawn_from(judged, node, p)
        token = tokens[:, node, None]
        drawn = q.gather(1, token)[:, 0]  # 0: the drafter could not have drawn it, so it is refused
        fits = (_coin(judged, node, depth) * drawn < p.gather(1, token)[:, 0]) & (drawn > 0)
        hit, miss = child & fits, child & ~fits
        p = torch.where(miss[:, None], _residual(p, q), p)
        p = torch.where(hit[:, None], p_all[judged.index[:, node + 1]], p)
        accepted[:, node] = hit
        current = torch.where(hit, node + 1, current)
        depth = depth + hit
    return accepted, _sample(judged, p, judged.root_positions + depth)


def _block(judged: Judged, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Sun et al., 2024, over chains: the longest prefix whose coin fits is kept, whatever came before it."""
    p_all = torch.softmax(judged.logits.double(), dim=1)
    tokens, sizes = judged.proposal.tokens, judged.proposal.sizes
    best = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    ratio = torch.ones(len(tokens), dtype=p_all.dtype, device=tokens.device)  # P_i
    final = p_all[judged.index[:, 0]]
    if judged.proposal.num_nodes:
        final = torch.where((sizes > 0)[:, None], _residual(final, _drawn_from(judged, 0, final)), final)
    for node in range(judged.proposal.num_nodes):
        p, here = p_all[judged.index[:, node]], tokens[:, node, None]
        q = _drawn_from(judged, node, p)
        drawn = q.gather(1, here)[:, 0]
        ratio = torch.where(drawn > 0, ratio * p.gather(1, here)[:, 0] / drawn, 0.0).clamp(max=1.0)
        after = p_all[judged.index[:, node + 1]]
        last = sizes == node + 1
        rest = after
        if node + 1 < judged.proposal.num_nodes:
            rest = (ratio[:, None] * after - _drawn_from(judged, node + 1, after)).clamp(min=0)
        mass = rest.sum(1)
        whole = mass + 1 - ratio
        chance = torch.where(last, ratio, torch.where(whole == 0, 1.0, mass / whole))
        depth = torch.full_like(best, node + 1)
        hit = (node < sizes) & (_coin(judged, node, depth) <= chance)
        best = torch.where(hit, node + 1, best)
        rest = torch.where(last[:, None] | (mass <= 0)[:, None], after, rest)
        final = torch.where(hit[:, None], rest / rest.sum(1, keepdim=True), final)
    accepted = torch.arange(judged.proposal.num_nodes, device=tokens.device) < best[:, None]
    return accepted, _sample(judged, final, judged.root_positions + 1 + best)


def _typical(judged: Judged, choices: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of likely enough tokens (ties: the likelier path), then a sample at its end."""
    p_all = torch.softmax(judged.logits.double(), dim=1)
    entropy = -(p_all * torch.log(p_all + 1e-5)).sum(1)
    enough = torch.clamp(TYPICAL_ALPHA * torch.exp(-entropy), max=TYPICAL_THRESHOLD)[judged.index]  # [B, N+1]
    tokens, parents = judged.proposal.tokens, judged.proposal.parents
    batch, nodes = tokens.shape
    reached = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=tokens.device)  # depth of accepted nodes
    reached[:, 0] = 0
    weight = torch.zeros(batch, nodes + 1, dtype=p_all.dtype, device=tokens.device)
    for node in range(nodes):
        above = (parents[:, node] + 1).clamp(min=0)[:, None]
        row = judged.index.gather(1, above)[:, 0]
        likely = p_all[row, tokens[:, node]]
        depth = reached.gather(1, above)[:, 0]
        fine = (likely > enough.gather(1, above)[:, 0]) & (depth >= 0) & (parents[:, node] >= -1)
        if judged.proposal.scratch is not None:
            fine = fine & ~judged.proposal.scratch[:, node]
        reached[:, node + 1] = torch.where(fine, depth + 1, -1)
        weight[:, node + 1] = weight.gather(1, above)[:, 0] + torch.log(likely)
    deepest = reached.amax(1, keepdim=True)
    current = torch.where(reached == deepest, weight, float("-inf")).argmax(1)
    accepted = torch.zeros(batch, nodes, dtype=torch.bool, device=tokens.device)
    at = current
    for node in range(nodes - 1, -1, -1):
        here = at == node + 1
        accepted[:, node] = here
        at = torch.where(here, parents[:, node] + 1, at)
    return accepted, choices.gather(1, current[:, None])[:, 0]


def _verdict(judged: Judged, accepted: Tensor, final: Tensor) -> Verdict:
    """Accepted nodes in order of depth (their index order), then the final token."""
    lengths = accepted.sum(1)
    nodes = torch.argsort((~accepted).to(torch.int8), dim=1, stable=True)
    places = torch.arange(accepted.shape[1] + 1, device=lengths.device)
    tokens = torch.cat([judged.proposal.tokens.gather(1, nodes), torch.zeros_like(final)[:, None]], dim=1)
    tokens = torch.where(places < lengths[:, None], tokens, torch.where(places == lengths[:, None], final[:, None], -1))
    nodes = torch.where(places[:-1] < lengths[:, None], nodes, -1)
    return Verdict(tokens, nodes, lengths)
