"""What a drafter is, what it is told and what it may ask for.

A drafter sees committed tokens, the states it tapped and, through `Context.draw`, the way tokens are picked.
It never sees stop tokens, sampling parameters, acceptance rules or scheduling, and never imports the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.tree import Proposal
from paceline.models.base import FINAL

if TYPE_CHECKING:
    from paceline.cache.kv import KVCache


@dataclass(frozen=True)
class Taps:
    """What a drafter wants of the target's forward."""

    hidden: tuple[int, ...] = ()  # boundaries 0..L: the residual after m layers, un-normed; FINAL = post-norm
    kv: tuple[int, ...] = ()  # layers whose cached keys and values it reads in place
    node_logits: bool = False  # the target's raw logits at every node


@dataclass
class Observation:
    """What just became permanent, for B sequences; rows R are packed sequence after sequence."""

    slots: list[int]  # [B]
    starts: list[int]  # [B] the first position that became permanent; above 0 at a sequence's first: a prefix hit
    counts: list[int]  # [B] how many positions did
    table: Slots  # all committed tokens and lengths, the newest token included
    states: Tensor | None = None  # [R, H·taps] the tapped states of those positions
    before: Tensor | None = None  # [B, H·taps] the state of position start-1 (zeros at position 0)
    node_logits: list[Tensor] | None = None  # per sequence [1+nodes, V], in the proposal's order

    def rows(self) -> tuple[Tensor, Tensor]:
        """Slot and position of every row, both [R]."""
        device = self.table.tokens.device.device
        slots = torch.tensor([slot for slot, n in zip(self.slots, self.counts) for _ in range(n)], dtype=torch.int64)
        positions = torch.tensor(
            [start + i for start, n in zip(self.starts, self.counts) for i in range(n)], dtype=torch.int64
        )
        return slots.to(device), positions.to(device)

    def shifted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The EAGLE/MTP pairs: token x_{i+1} with the state f_i and position i, for every i whose pair became whole.

        Row 0 of a sequence that goes on from position s > 0 was paired last time, except after a prefix hit, where
        `before` supplies f_{s-1} for the token x_s that is its first.
        """
        assert self.states is not None, "shifted() needs tapped hidden states"
        slots, positions = self.rows()
        return self.table.tokens.device[slots, positions + 1], positions, self.states


class Context(Protocol):
    """What `propose` works on: B decoding sequences."""

    slot_list: list[int]
    budgets: Tensor  # [B] the most nodes each may get
    max_nodes: int  # the largest of them
    table: Slots

    @property
    def slots(self) -> Tensor:
        """[B] slot_list on the device."""
        ...

    @property
    def lengths(self) -> Tensor:
        """[B] committed lengths, the newest token included."""
        ...

    def only(self, rows: list[int]) -> Context:
        """A fresh context for some of the sequences, nothing drawn yet."""
        ...

    def draw(self, logits: Tensor, parents: Tensor, count: int = 1) -> Tensor:
        """Pick `count` children of node parents[b] from logits[b] ([B, V], target ids) and add them as nodes.

        Returns the tokens, [B, count]. The only way to pick a token that was drawn rather than copied: it applies the
        request's own processors, temperature and noise for that node.
        """
        ...

    def drawn(self, name: str, chain: bool = True) -> Proposal:
        """The nodes drawn so far, as a proposal; chain: each was drawn as the child of the one before."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A running drafter. `name` appears in provenance; the rest is the contract of the design, section 3."""

    name: str
    taps: Taps
    max_nodes: int
    trees: bool  # whether proposals may branch
    on_device: bool

    def attach(self, target: Target, cache: KVCache) -> None: ...

    def observe(self, seen: Observation) -> None: ...

    def propose(self, context: Context) -> Proposal: ...

    def forget(self, slots: list[int]) -> None: ...


class DrafterConfig(Protocol):
    """What users write: a frozen dataclass that makes a fresh drafter for each engine."""

    def create(self) -> Drafter: ...


@dataclass(frozen=True)
class Target:
    """What a drafter may borrow from the target."""

    model: Any  # a paceline model: its embedding, its head, its config
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    kernels: str


class Stateless:
    """The empty answers, for drafters that keep nothing."""

    taps = Taps()
    trees = False
    on_device = True

    def attach(self, target: Target, cache: KVCache) -> None:
        pass

    def observe(self, seen: Observation) -> None:
        pass

    def forget(self, slots: list[int]) -> None:
        pass


__all__ = ["FINAL", "Context", "Drafter", "DrafterConfig", "Observation", "Stateless", "Taps", "Target"]
