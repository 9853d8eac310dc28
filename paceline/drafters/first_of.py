"""Composition is a drafter: ask one after another, and take for each sequence the first that has something to say."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import (
    Context,
    Drafter,
    DrafterConfig,
    HostRows,
    Needs,
    Observation,
    Taps,
    Target,
    captured_as,
    is_mixed,
    may_be_told_late,
)
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
    def __init__(self, drafters: list[Drafter]) -> None:
        self.drafters = drafters
        self.name = " then ".join(drafter.name for drafter in drafters)
        self._gather()

    def _gather(self) -> None:
        """What the parts say of themselves; some know it only when they have seen the target."""
        drafters = self.drafters
        hidden = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps.hidden))
        kv = tuple(dict.fromkeys(layer for drafter in drafters for layer in drafter.taps.kv))
        self.taps = Taps(hidden, kv, any(drafter.taps.node_logits for drafter in drafters))
        self.max_nodes = max(drafter.max_nodes for drafter in drafters)
        self.trees = any(drafter.trees for drafter in drafters)
        self.on_device = all(drafter.on_device for drafter in drafters)
        self.mixed = not self.on_device and any(part.on_device or is_mixed(part) for part in drafters)
        self.told_late = all(map(may_be_told_late, drafters))
        self.learned = all(drafter.learned for drafter in drafters)

    def plan(self, target: Target) -> Needs:
        needs = [drafter.plan(target) for drafter in self.drafters]
        self._gather()
        layers = tuple(layer for need in needs for layer in need.layers)
        width = sum(target.model.tap_width(tap) for tap in self.taps.hidden)
        return Needs(layers, width, sum(need.bytes for need in needs))

    def attach(self, target: Target, cache: KVCache) -> None:
        self._widths = [target.model.tap_width(tap) for tap in self.taps.hidden]
        for drafter in self.drafters:
            drafter.attach(target, cache)

    def forget(self, slots: list[int]) -> None:
        for drafter in self.drafters:
            drafter.forget(slots)

    def reset(self) -> None:
        for drafter in self.drafters:
            drafter.reset()

    def note(self, rows: HostRows) -> None:
        """Where all parts are asked they know now; else when it is known for whom."""
        self._rows = rows
        asked = rows.num_drafting if rows.table.apart and self.on_device else 0
        for drafter in self.drafters:
            drafter.note(replace(rows, num_drafting=asked, judged=False))

    def captured_as(self) -> Hashable | None:
        parts = [captured_as(drafter) for drafter in self.drafters]
        return None if None in parts else tuple(parts)

    def _note_asked(self, drafter: Drafter, numbers: list[int]) -> None:
        rows = self._rows
        slots, sizes = [rows.slots[number] for number in numbers], [rows.sizes[number] for number in numbers]
        starts = [rows.starts[number] for number in numbers]
        drafter.note(HostRows(rows.table, slots, starts, sizes, len(numbers), judged=False))

    def observe(self, seen: Observation) -> None:
        """Each part that is to be told sees the states it tapped."""
        for drafter in self.drafters:
            if seen.on_device not in (None, drafter.on_device) and not is_mixed(drafter):
                continue
            states, before = self._part(seen.states, drafter), seen.before
            if before is not None:
                kept = self._part(before.states, drafter)
                before = None if kept is None else replace(before, states=kept)
            drafter.observe(replace(seen, states=states, before=before))

    def _part(self, states: Tensor | None, drafter: Drafter) -> Tensor | None:
        """The columns one drafter tapped, of all that were."""
        if states is None or not drafter.taps.hidden:
            return None
        columns = dict(zip(self.taps.hidden, torch.split(states, self._widths, dim=1)))
        return torch.cat([columns[tap] for tap in drafter.taps.hidden], dim=1)

    def propose(self, context: Context) -> Proposal:
        if context.table.apart and self.on_device:
            return self._ask_all(context)
        left = list(range(len(context.slot_list)))
        parts: list[tuple[list[int], Proposal]] = []
        for drafter in self.drafters:
            if not left:
                break
            part = context.only(left, drafter.max_nodes, drafter.trees)
            if not part.max_nodes:  # a chain has no room any more, and a tree of another has
                continue
            if context.table.apart:
                self._note_asked(drafter, left)
            proposal = drafter.propose(part).cut(part.budgets)
            sizes = proposal.sizes.tolist()
            parts.append((left, proposal))
            left = [row for row, size in zip(left, sizes) if size == 0]
        return merge(parts, len(context.slot_list), context.table.device)

    def _ask_all(self, context: Context) -> Proposal:
        """Nobody waits to hear who has something to say: all are asked, and the first answer of each row stands."""
        contexts = [context.only(None, drafter.max_nodes, drafter.trees) for drafter in self.drafters]
        answers = [drafter.propose(own).cut(own.budgets) for drafter, own in zip(self.drafters, contexts)]
        taken = torch.zeros(len(context.slot_list), dtype=torch.bool, device=context.table.device)
        for number, answer in enumerate(answers):
            free = ~taken
            taken = taken | (answer.sizes > 0)
            parents = torch.where(free[:, None], answer.parents, PADDING)
            answers[number] = replace(answer, sizes=torch.where(free, answer.sizes, 0), above=parents)
        return merge([(None, answer) for answer in answers], len(context.slot_list), context.table.device)


def merge(parts: Sequence[tuple[list[int] | None, Proposal]], batch: int, device: torch.device) -> Proposal:
    """Proposals for some rows each (None: all), later ones filling rows that earlier ones left empty."""
    nodes = max(proposal.num_nodes for _, proposal in parts)
    tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    parents, origins, sizes = torch.full_like(tokens, PADDING), torch.zeros_like(tokens), tokens.new_zeros(batch)
    vocab = next((p.probs.shape[2] for _, p in parts if p.probs is not None), 0)
    probs = torch.zeros(batch, nodes, vocab, dtype=torch.float32, device=device) if vocab else None
    scratch = None
    if any(proposal.scratch is not None for _, proposal in parts):
        scratch = torch.zeros(batch, nodes, dtype=torch.bool, device=device)
    names: tuple[str, ...] = ()
    for rows, proposal in parts:
        width = proposal.num_nodes
        index = torch.arange(batch, device=device) if rows is None else torch.tensor(rows, dtype=torch.int64).to(device)
        own = (proposal.sizes > 0)[:, None]

        def put(into: Tensor, values: Tensor, index: Tensor = index, own: Tensor = own, width: int = width) -> None:
            mask = own if values.dim() == 2 else own[:, :, None]
            into[index, :width] = torch.where(mask, values, into[index, :width])

        put(tokens, proposal.tokens)
        put(parents, proposal.parents)
        origin = torch.zeros_like(proposal.tokens) if proposal.origins is None else proposal.origins
        put(origins, origin + len(names))
        sizes[index] = torch.where(own[:, 0], proposal.sizes, sizes[index])
        names += proposal.names
        if probs is not None:
            chosen = torch.nn.functional.one_hot(proposal.tokens, vocab).float()
            put(probs, chosen if proposal.probs is None else proposal.probs)
        if scratch is not None and proposal.scratch is not None:
            put(scratch, proposal.scratch)
    chain = all(proposal.chain for _, proposal in parts)
    deepest = max(p.num_nodes if p.max_depth is None else p.max_depth for _, p in parts)
    return Proposal(tokens, parents, sizes, chain, probs, scratch, names, origins, deepest)
