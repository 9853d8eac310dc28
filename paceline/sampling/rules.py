"""The acceptance rules: what each takes of a proposal, and what it asks of the drafters.

    exact       a node is accepted iff it is the token the target samples there with its keyed noise (the default)
    rejection   the papers' rule: accept with probability p/q, else go on with the residual; the same distribution
    block       the same, judging a chain as a whole; never fewer accepted tokens on average
    typical     accept what is likely enough. Lossy: the text's distribution changes

A rule is one row of `RULES` and one function, its judge: (judged, choices) -> Verdict, where choices [B, N+1] are the
tokens the target itself samples at every row. Nothing else tests a rule's name. A judge reads nothing from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.sampling import noise
from paceline.sampling.verify import Judged, Verdict, argmax, settle, walk

TYPICAL_THRESHOLD, TYPICAL_ALPHA = 0.09, 0.3  # Medusa's (Cai et al., 2024)


@dataclass(frozen=True)
class Rule:
    name: str
    judge: Callable[[Judged, Tensor], Verdict]
    needs_probs: bool = False  # drafters must keep q, the distribution each token was drawn from
    follows: bool = False  # what is accepted is what the target itself samples, and nothing else
    shares_noise: bool = False  # drafters draw with the target's own sample stream, so that both agree more often
    chains_only: bool = False


def exact(judged: Judged, choices: Tensor) -> Verdict:
    """The target's own choices, as far as the proposal holds them."""
    return walk(judged, choices)


def rejection(judged: Judged, choices: Tensor) -> Verdict:
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
    return settle(judged, choices, accepted, _sample(judged, p, judged.root_positions + depth))


def block(judged: Judged, choices: Tensor) -> Verdict:
    """Sun et al., 2024, over chains: the longest prefix whose coin fits is kept, whatever came before it."""
    p_all = torch.softmax(judged.logits.double(), dim=1)
    tokens, sizes = judged.proposal.tokens, judged.proposal.sizes
    if judged.proposal.scratch is not None:  # a chain ends where it may not be accepted
        sizes = torch.minimum(sizes, (~judged.proposal.scratch).cumprod(1).sum(1))
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
    return settle(judged, choices, accepted, _sample(judged, final, judged.root_positions + 1 + best))


def typical(judged: Judged, choices: Tensor) -> Verdict:
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
    return settle(judged, choices, accepted, choices.gather(1, current[:, None])[:, 0])


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


RULES = {
    rule.name: rule
    for rule in (
        Rule("exact", exact, follows=True, shares_noise=True),
        Rule("rejection", rejection, needs_probs=True),
        Rule("block", block, needs_probs=True, chains_only=True),
        Rule("typical", typical, shares_noise=True),
    )
}


def find_rule(name: str) -> Rule:
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise OptionError(f"acceptance={name!r} is not known; allowed: {', '.join(RULES)} (typical is lossy)")
    return rule
