"""Composition is a drafter: ask one after another, and take for each sequence the first that has something to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Drafter, DrafterConfig, Observation, Taps, Target
from paceline.drafters.tree import PADDING, Proposal
from paceline.errors import OptionError


class FirstOf:
    """FirstOf(Suffix(), NGram()): the first drafter with a proposal drafts; the others are not asked."""

    def __init__(self, *drafters: Any) -> None:
        from paceline.drafters import make

        if len(drafters) < 2:
            raise OptionError(f"FirstOf needs two drafters or more, got {len(drafters)}")
        configs = [make(drafter) for drafter in drafters]
        if any(config is None for config in configs):
            raise OptionError("FirstOf takes drafters, not None")
        self.configs: list[DrafterConfig] = [config for config in configs if config is not None]

    def create(self) -> FirstOfDrafter:
        return FirstOfDrafter([config.create() for config in self.configs])


class FirstOfDrafter:
    name = "first_of"

    def __init__(self, drafters: list[Drafter]) -> None:
        self.drafters = drafters
        hidden = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps.hidden))
        kv = tuple(dict.fromkeys(layer for drafter in drafters for layer in drafter.taps.kv))
        self.taps = Taps(hidden, kv, any(drafter.taps.node_logits for drafter in drafters))
        self.max_nodes = max(drafter.max_nodes for drafter in drafters)
        self.trees = any(drafter.trees for drafter in drafters)
        self.on_device = all(drafter.on_device for drafter in drafters)

    def attach(self, target: Target, cache: KVCache) -> None:
        for drafter in self.drafters:
            drafter.attach(target, cache)

    def forget(self, slots: list[int]) -> None:
        for drafter in self.drafters:
            drafter.forget(slots)

    def observe(self, seen: Observation) -> None:
        for drafter in self.drafters:
            states, before = self._part(seen.states, drafter), self._part(seen.before, drafter)
            drafter.observe(replace(seen, states=states, before=before))

    def _part(self, states: Tensor | None, drafter: Drafter) -> Tensor | None:
        """The columns one drafter tapped, of all that were."""
        if states is None or not drafter.taps.hidden:
            return None
        columns = states.view(len(states), len(self.taps.hidden), -1)
        wanted = [self.taps.hidden.index(tap) for tap in drafter.taps.hidden]
        return columns[:, wanted].flatten(1)

    def propose(self, context: Context) -> Proposal:
        left = list(range(len(context.slot_list)))
        parts: list[tuple[list[int], Proposal]] = []
        for drafter in self.drafters:
            if not left:
                break
            part = context.only(left)
            part.budgets = part.budgets.clamp(max=drafter.max_nodes)
            part.max_nodes = min(part.max_nodes, drafter.max_nodes)
            proposal = drafter.propose(part).limited(part.budgets)
            sizes = proposal.sizes.tolist()
            parts.append((left, proposal))
            left = [row for row, size in zip(left, sizes) if size == 0]
        return merge(parts, len(context.slot_list), context.slots.device)


def merge(parts: list[tuple[list[int], Proposal]], batch: int, device: torch.device) -> Proposal:
    """Proposals for some rows each, later ones filling rows that earlier ones left empty."""
    nodes = max(proposal.num_nodes for _, proposal in parts)
    result = Proposal.empty(batch, device)
    result.tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    result.parents = torch.full((batch, nodes), PADDING, dtype=torch.int64, device=device)
    result.origins = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    result.chain = all(proposal.chain for _, proposal in parts)
    vocab = next((p.probs.shape[2] for _, p in parts if p.probs is not None), 0)
    if vocab:
        result.probs = torch.zeros(batch, nodes, vocab, device=device)
    if any(proposal.scratch is not None for _, proposal in parts):
        result.scratch = torch.zeros(batch, nodes, dtype=torch.bool, device=device)
    for rows, proposal in parts:
        index, width = torch.tensor(rows, device=device), proposal.num_nodes
        result.tokens[index, :width] = proposal.tokens
        result.parents[index, :width] = proposal.parents
        result.sizes[index] = proposal.sizes
        own = torch.zeros_like(proposal.tokens) if proposal.origins is None else proposal.origins
        result.origins[index, :width] = own + len(result.names)
        result.names += proposal.names
        if result.probs is not None:
            chosen = torch.nn.functional.one_hot(proposal.tokens, vocab).float()
            result.probs[index, :width] = chosen if proposal.probs is None else proposal.probs
        if result.scratch is not None and proposal.scratch is not None:
            result.scratch[index, :width] = proposal.scratch
    return result
