"""The base of drafters that draft from the target's newest state alone: Medusa, MLP speculators.

They keep, by slot and on the device, the target's final state at the last computed position: the one in front of the
newest token. No cache layers, no positions; a prefix hit costs nothing, since every round computes a position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import FINAL, Context, Observation, QuietDrafter, Taps, Target


class StateKeeper(QuietDrafter):
    """Subclasses read their weights in `plan` and draft from `newest(context)`."""

    taps = Taps(hidden=(FINAL,))
    on_device = True
    learned = True

    def attach(self, target: Target, cache: KVCache) -> None:
        rows, width = target.max_num_seqs + 1, sum(target.model.tap_width(tap) for tap in self.taps.hidden)
        self._states = torch.zeros(rows, width, dtype=target.dtype, device=target.device)  # [S+1, W]
        self._ready = torch.zeros(rows, dtype=torch.bool, device=target.device)  # [S+1] it was shown a state

    def observe(self, seen: Observation) -> None:
        assert seen.states is not None
        if (rounds := seen.table.rounds) is not None:
            rounds.put(seen.newest, (seen.states,), (self._states,), self._ready, seen.table.null)
            return
        self._states[seen.newest] = seen.states.to(self._states.dtype)
        self._ready[seen.newest] = True

    def newest(self, context: Context) -> Tensor:
        """[B, W] the state in front of each newest token."""
        return self._states[context.slots]

    def most_nodes(self, context: Context) -> Tensor:
        """[B] the budgets; 0 for a sequence whose state it has not been shown yet (it was switched on just now)."""
        return torch.where(self._ready[context.slots], context.budgets, 0)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._ready[slot].fill_(False)

    def reset(self) -> None:
        self._ready.zero_()
