"""What a drafter is shown of a round that was judged: which rows became permanent, their tokens and their states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.ops import Layout
from paceline.kernels.rounds import Kept, Rounds
from paceline.models.batch import Batch
from paceline.sampling.verify import Followed, Verdict, path_of


@dataclass(frozen=True)
class Before:
    """The tapped states of the position in front of each sequence's first row, for sequences seen the first time."""

    states: Tensor  # [B, W]
    known: Tensor  # [B] bool: they were kept. Not: the sequence was seen before, begins at 0, or nobody tapped then
    positions: Tensor  # [B] of the first row


class Pairs(NamedTuple):
    """The token x_{i+1} with the state f_i in front of it, as EAGLE and MTP read them; stored at x_{i+1}'s place."""

    slots: Tensor  # [M] the null slot where not valid
    tokens: Tensor  # [M] x_{i+1}
    positions: Tensor  # [M] i + 1
    states: Tensor  # [M, W] f_i
    valid: Tensor  # [M] bool


class Known(NamedTuple):
    """What the host knows was kept of one sequence."""

    slot: int
    start: int  # the first row's position; each stands one behind the other
    rows: list[int]  # of the batch


@dataclass
class Observation:
    """What just became permanent: T rows, those of the target's batch, of which `kept` are.

    Made for every round; what nobody asks for is not computed.
    """

    table: Slots  # all committed tokens and lengths, the newest token included
    batch: Batch
    verdict: Verdict | Followed | None  # None: prompt chunks alone
    slot_list: list[int]  # of the B sequences
    states: Tensor | None = None  # [T, W] the tapped states, side by side
    before: Before | None = None  # only where a sequence is seen the first time and does not begin at 0
    logits: Tensor | None = None  # [R, V] raw, of the batch's sampled rows
    on_device: bool | None = None  # drafters that are told: those on the device, those on the host; None: all

    @cached_property
    def _at_once(self) -> Kept | None:
        """All that follows, where kernels find it in one launch."""
        return None if self.table.rounds is None else self._find_kept(self.table.rounds, None)

    def _find_kept(self, rounds: Rounds, first: Tensor | None) -> Kept:
        nodes = None if self.verdict is None or not self.batch.places.num_nodes else path_of(self.verdict)
        return rounds.observe(self.batch.layout, self.batch.places.rows, nodes, self.table.tables, first)

    @cached_property
    def kept(self) -> Tensor:
        """[T] committed rows, and nodes that were accepted, as far as the sequence goes: a stop may come before."""
        if self._at_once is not None:
            return self._at_once.kept
        places, layout = self.batch.places, self.batch.layout
        real = (layout.slots != self.table.null) & (layout.positions < self.table.lengths[layout.slots] - 1)
        if self.verdict is None or not places.num_nodes:
            return real
        nodes = path_of(self.verdict)  # [B, D], -1 beyond
        width = places.num_nodes
        accepted = torch.zeros(len(nodes), width + 1, dtype=torch.bool, device=nodes.device)
        accepted = accepted.scatter(1, torch.where(nodes >= 0, nodes, width), True)[:, :width]
        is_node = places.node >= 0
        sequence = torch.where(is_node, places.owner, 0)
        return real & (~is_node | accepted[sequence, places.node.clamp(min=0)])

    @cached_property
    def slots(self) -> Tensor:
        """[T] the null slot for rows that were not kept."""
        if self._at_once is not None:
            return self._at_once.slots
        return torch.where(self.kept, self.batch.layout.slots, self.table.null)

    @cached_property
    def positions(self) -> Tensor:
        """[T] 0 for rows that were not kept."""
        if self._at_once is not None:
            return self._at_once.positions
        return torch.where(self.kept, self.batch.layout.positions, 0)

    @cached_property
    def following(self) -> Tensor:
        """[T] the committed token behind each kept row; there always is one."""
        if self._at_once is not None:
            return self._at_once.following
        return self.table.tokens.tensor[self.slots, self.positions + 1]

    @cached_property
    def newest(self) -> Tensor:
        """[T] the slot of a kept row in front of its sequence's newest token; the null slot for all others."""
        if self._at_once is not None:
            return self._at_once.newest
        last = self.kept & (self.positions == self.table.lengths[self.slots] - 2)
        return torch.where(last, self.slots, self.table.null)

    @cached_property
    def tails(self) -> Tensor:
        """[T] the page that ends with a kept row; 0 for all others."""
        if self._at_once is not None:
            return self._at_once.tails
        size = self.batch.layout.block_size
        pages = self.table.pages.tensor[self.slots, self.positions // size]
        return torch.where(self.positions % size == size - 1, pages, 0)

    def pair_rows(self, first: Tensor) -> Batch | None:
        """What `pairs` names as rows to be run, where kernels laid them out and none crosses a prefix hit.

        first [S+1]: the lowest position that each slot sees; who asks before anything else was gets it in one launch.
        """
        rounds, layout = self.table.rounds, self.batch.layout
        if rounds is None or self.before is not None:
            return None
        found = self.__dict__.get("_at_once") or self._find_kept(rounds, first)
        self._at_once = found._replace(lowest=None)  # another's slots may see others
        lowest = torch.minimum(first[found.slots], found.behind) if found.lowest is None else found.lowest
        spans = [span._replace(reach=span.reach + 1) for span in layout.spans]  # a row's place is one behind its own
        where = (found.slots, found.behind, found.base, None, lowest, found.behind, found.write)
        rows = Layout(*where, self.table.pages.tensor, layout.block_size, spans, self.batch.places.grid)
        rows.tiles = layout.tiles
        return Batch(found.following, rows, self.batch.places, self.batch.slot_list, found.newest)

    def pairs(self) -> Pairs:
        """Every pair that became whole; after a prefix hit also the one that crosses it, where its state was kept.

        A sequence's first token has no state in front of it. A kept row's pair is whole now, its following token being
        committed; so each pair is seen once, in the round that computed its state.
        """
        assert self.states is not None, "pairs() needs tapped hidden states"
        rows = Pairs(self.slots, self.following, self.positions + 1, self.states, self.kept)
        if self.before is None:
            return rows
        slots = torch.where(self.before.known, self.batch.slots, self.table.null)
        places = torch.where(self.before.known, self.before.positions, 0)
        tokens = self.table.tokens.tensor[slots, places]
        crossing = Pairs(slots, tokens, places, self.before.states.to(self.states.dtype), self.before.known)
        return Pairs(*(torch.cat(parts) for parts in zip(crossing, rows)))

    def known(self) -> list[Known]:
        """What was kept of each sequence, where the host knows it all: without looking at a tensor."""
        assert not self.table.apart
        accepted: list[list[int]] = [] if self.verdict is None else self.verdict.read().nodes
        found = []
        for number, (slot, span, (count, _)) in enumerate(
            zip(self.slot_list, self.batch.layout.spans, self.batch.places.shape)
        ):
            start, nodes = span.reach - span.num_rows, accepted[number] if number < len(accepted) else []
            kept = [*range(count), *(count + node for node in nodes)][: max(0, self.table.length(slot) - 1 - start)]
            found.append(Known(slot, start, [span.row + row for row in kept]))
        return found
