"""The context a drafter proposes in: it hides temperature, processors, noise and acceptance rule behind `draw`."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.tree import PADDING, Proposal
from paceline.sampling import noise
from paceline.sampling.processors import process
from paceline.sampling.state import Rows, SamplerState
from paceline.sampling.verify import argmax


class DraftContext:
    """B decoding sequences, and the nodes drawn for them so far."""

    def __init__(
        self, slot_list: list[int], budgets: list[int], table: Slots, state: SamplerState, acceptance: str
    ) -> None:
        device = table.tokens.device.device
        self.slot_list = slot_list
        self.budgets = torch.tensor(budgets, dtype=torch.int64).to(device, non_blocking=True)
        self.max_nodes = max(budgets, default=0)
        self.table, self.device = table, device
        self._state, self._acceptance = state, acceptance
        self._keep_probs = acceptance in ("rejection", "block") and state.any_sampled(slot_list)
        self._exact = acceptance in ("exact", "typical")
        self._probs: list[Tensor] = []

    # Made when first asked for: a drafter that looks things up on the host needs none of them.

    @cached_property
    def slots(self) -> Tensor:
        return torch.tensor(self.slot_list, dtype=torch.int64).to(self.device, non_blocking=True)

    @cached_property
    def lengths(self) -> Tensor:
        return self.table.lengths[self.slots]

    @cached_property
    def _tokens(self) -> Tensor:  # [B, n] of the nodes drawn so far
        return self._nothing()

    @cached_property
    def _parents(self) -> Tensor:  # [B, n]
        return self._nothing()

    @cached_property
    def _paths(self) -> Tensor:  # [B, n, D] tokens from the root down to each node, -1 beyond
        return self._nothing()[:, :, None]

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.slot_list), 0, dtype=torch.int64, device=self.device)

    def only(self, rows: list[int]) -> DraftContext:
        """A fresh context for some of the sequences."""
        budgets = self.budgets.tolist()
        slots, limits = [self.slot_list[row] for row in rows], [budgets[row] for row in rows]
        return DraftContext(slots, limits, self.table, self._state, self._acceptance)

    def draw(self, logits: Tensor, parents: Tensor, count: int = 1) -> Tensor:
        """Pick children as the target would, or draw them from the drafter's own distribution: see the protocol."""
        path = self._path_to(parents)
        rows = Rows(self.slots, self.slot_list, self.lengths - 1 + (path >= 0).sum(1), path)
        processed = process(logits.float(), rows, self._state)
        scores = self._perturbed(processed, rows)
        if count == 1:
            picked = argmax(scores).clamp(min=0)[:, None]
        else:
            picked = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
        if self._keep_probs:
            rest = torch.softmax(processed.double(), dim=1)
            for child in range(count):
                self._probs.append(rest.float())
                rest = rest.scatter(1, picked[:, child, None], 0.0)
                rest = rest / rest.sum(1, keepdim=True).clamp(min=1e-300)
        self._append(picked, parents, path)
        return picked

    def drawn(self, name: str, chain: bool = True) -> Proposal:
        index = torch.arange(self._tokens.shape[1], device=self._tokens.device)
        probs = torch.stack(self._probs, dim=1) if self._probs else None
        inside = index < self.budgets[:, None]
        parents = torch.where(inside, self._parents, PADDING)
        return Proposal(self._tokens, parents, inside.sum(1), chain, probs, names=(name,))

    def _perturbed(self, processed: Tensor, rows: Rows) -> Tensor:
        """Gumbel-max scores: the target's own noise in `exact`, so that both agree more often; else the draft's."""
        if not self._state.any_sampled(self.slot_list):
            return processed
        stream, extra = (noise.SAMPLE, None) if self._exact else (noise.DRAFT, self.lengths)
        keys = self._state.keys(self.slots)
        values = noise.gumbel(keys, rows.positions + 1, stream, processed.shape[1], extra)
        return torch.where(self._state.greedy(self.slots)[:, None], processed, processed + values)

    def _path_to(self, parents: Tensor) -> Tensor:
        """[B, D] the drafted tokens down to each sequence's parent node."""
        if self._tokens.shape[1] == 0:
            return self._tokens
        depth = self._paths.shape[2]
        path = self._paths.gather(1, parents.clamp(min=0)[:, None, None].expand(-1, 1, depth))[:, 0]
        return torch.where((parents >= 0)[:, None], path, -1)

    def _append(self, picked: Tensor, parents: Tensor, path: Tensor) -> None:
        batch, count = picked.shape
        self._tokens = torch.cat([self._tokens, picked], dim=1)
        self._parents = torch.cat([self._parents, parents[:, None].expand(batch, count)], dim=1)
        depth = (path >= 0).sum(1)  # [B]
        wide = torch.nn.functional.pad(path, (0, 1), value=-1)[:, None].expand(batch, count, -1)
        here = torch.arange(wide.shape[2], device=wide.device) == depth[:, None]
        new = torch.where(here[:, None], picked[:, :, None], wide)
        width = max(new.shape[2], self._paths.shape[2])
        old = torch.nn.functional.pad(self._paths, (0, width - self._paths.shape[2]), value=-1)
        new = torch.nn.functional.pad(new, (0, width - new.shape[2]), value=-1)
        self._paths = torch.cat([old, new], dim=1)
