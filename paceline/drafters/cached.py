"""The base of drafters that keep cache layers of their own, under the target's pages and slots.

Of each sequence it knows, by slot and on the device: `read`, how many positions its layers hold, and `first`, below
which they hold nothing of its own (a prefix hit it did not fill) and rows stay masked. The host knows, told by `note`,
when a sequence begins and which pages were filled by this very drafter.

A `TokenReader` needs tokens alone and reads them when next it is asked to draft: who never drafts costs nothing. A
`StateReader` needs the target's states: it reads the pairs it is shown in `observe`, and can read nothing again.

A drafter's speculative rows are disposable: they lie behind `read`, and whoever reads further writes over them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import SPREAD, Slots, numbers
from paceline.drafters.base import Context, HostRows, Observation, Pairs, QuietDrafter, Target
from paceline.kernels.chain import Feeding
from paceline.kernels.ops import Hidden, LayerSpec
from paceline.models.base import Model
from paceline.models.batch import Batch, Nodes, Shape, Static, Work, pack, pack_rows, places_of, rows_at

MAX_ROWS = 512  # rows a single pass over unread tokens may have
FEW = 32  # so many unread tokens of a sequence need no pass of their own


@dataclass
class Standing:
    """What the host knows of one sequence."""

    start: int  # it did not see the positions before this computed
    first: int | None = None  # pages that begin before it are not its own; None: nothing is read yet
    marked: int = 0  # pages up to here have been looked at and, if its own, marked
    behind: int = 0  # computed positions it has not read, at most, before the round that comes


class CachedDrafter(QuietDrafter):
    """What both kinds share. Subclasses call `open_cache` in `attach`."""

    on_device = True
    learned = True
    rereads: bool  # what it missed it can read later
    begins = 0  # of a stretch that it saw, so many positions hold nothing

    def open_cache(self, target: Target, cache: KVCache, specs: Sequence[LayerSpec], reach: int) -> None:
        """specs: of its own layers; behind them its forward finds those of the target that it taps (`taps.kv`).

        reach: positions at or beyond it cannot be read (learned positions end).
        """
        rows = target.max_num_seqs + 1
        self._cache, self._epoch, self._reach = cache, cache.new_epoch(), reach
        self._caches = [*cache.add_layers(specs), *(cache.layers[layer] for layer in self.taps.kv)]
        self.read = torch.zeros(rows, dtype=torch.int64, device=target.device)  # [S+1]
        self.first = torch.zeros(rows, dtype=torch.int64, device=target.device)  # [S+1]
        self._standing: dict[int, Standing] = {}

    def note(self, rows: HostRows) -> None:
        """Where sequences that are new begin."""
        for slot, start in zip(rows.slots, rows.starts):
            if slot not in self._standing:
                assert start is not None, "nothing is ahead of a sequence that is seen the first time"
                self._standing[slot] = Standing(start)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._standing.pop(slot, None)

    def reset(self) -> None:
        self._standing.clear()

    def _begin(self, table: Slots, slot: int) -> None:
        """Where to start reading, the first time it does.

        Its own pages count as read. Pages nobody else holds it may read again, if it can; what is left stays masked.
        The first place of a text, or of a stretch it saw, may hold nothing (`begins`).
        """
        standing = self._standing[slot]
        if standing.first is not None:
            return
        pool, pages, start = self._cache.pool, table.pages.host[slot], standing.start
        own = alone = -(-start // pool.block_size)
        if start % pool.block_size == 0:
            while own and pool.epochs[int(pages[own - 1])] == self._epoch:
                own -= 1
        while alone and self.rereads and pool.refs(int(pages[alone - 1])) == 1:
            alone -= 1
        again = alone < own
        first = alone * pool.block_size if again else min(own * pool.block_size, start)
        read = first if again else start
        seen = min(first + self.begins, max(0, self._reach - 2))  # whoever is beyond reads the last two, for nobody
        self.read[slot].fill_(read)  # as in `forget`
        self.first[slot].fill_(seen)
        standing.first, standing.marked = first, first // pool.block_size
        standing.behind += start - read

    def _mark(self, table: Slots, slot: int, length: int) -> None:
        """So many positions are read, or will be by the round that comes: full pages are its own, and a later prefix
        hit may use them."""
        size, standing = self._cache.pool.block_size, self._standing[slot]
        full = min(length, self._reach) // size
        if standing.first is None or full <= standing.marked:
            return
        for number in range(standing.marked, full):
            if number * size >= standing.first:
                self._cache.pool.epochs[int(table.pages.host[slot, number])] = self._epoch
        standing.marked = full

    def step_batch(self, context: Context, tokens: Tensor, step: int, most: Tensor) -> Batch:
        """A row for each sequence: its own draft number `step` (1 the first), tokens [B], behind its newest token.

        Sequences that may have no further draft (most[b] <= step) have a row that is nobody's.
        """
        table, count = context.table, len(context.slot_list)
        nodes = Nodes(tokens[:, None], torch.ones_like(tokens), None)
        if table.apart:
            starts = context.lengths - 1 + step
            return self._pack_ahead(context, ((0, 1),) * count, starts, context.lengths - 1 + most, nodes)
        going = (most > step).tolist()
        work = [
            Work(slot, table.length(slot) - 1 + step, 0, 1) if on else Work(table.null, 0, 0, 1)
            for slot, on in zip(context.slot_list, going)
        ]
        return self._pack(work, table, nodes)

    def feeding(self, context: Context, most: Tensor) -> Feeding:
        """Where its own drafts are fed, one behind another, behind everyone's newest token: most[b] - 1 of them."""
        pages, size = context.table.pages.tensor, self._cache.pool.block_size
        return Feeding(context.slots, context.lengths, most, self.first, pages, size)

    def level_batch(self, context: Context, tokens: Tensor, paths: Tensor | None, fed: int, most: Tensor) -> Batch:
        """W rows for each sequence, tokens [B, W]: drafts of its own, behind its newest token and `fed` such rows.

        paths [B, W, D]: for each its ancestors among all rows fed, by depth, itself last; None: a chain. A sequence
        has room for most[b] - 1 of them; rows beyond are nobody's.
        """
        table, (count, width) = context.table, tokens.shape
        places = places_of(((0, width),) * count, count, width, table.device)
        reach = min(table.longest(context.slot_list) + fed + width, table.max_length + SPREAD) + 1
        nodes = Nodes(tokens, torch.full_like(context.slots, width), paths)
        given = Static([reach] * count, nodes, context.lengths + most - 1, self.first[context.slots], skipped=fed)
        return pack_rows(places, context.slots, context.lengths, table, self._cache.pool.block_size, given)

    def _pack(self, work: list[Work], table: Slots, nodes: Nodes | None) -> Batch:
        batch = pack(work, table, self._cache.pool.block_size, nodes)
        batch.layout.first = self.first.index_select(0, batch.layout.slots)
        return batch

    def _pack_ahead(
        self,
        context: Context,
        shape: Shape,
        starts: Tensor,
        ends: Tensor,
        nodes: Nodes | None = None,
        since: Tensor | None = None,
    ) -> Batch:
        width = 0 if nodes is None else nodes.tokens.shape[1]
        places = places_of(shape, len(shape), width, context.table.device)
        reach = context.table.longest(context.slot_list) + 1
        given = Static([reach] * len(shape), nodes, ends, self.first[context.slots], since)
        return pack_rows(places, context.slots, starts, context.table, self._cache.pool.block_size, given)


class TokenReader(CachedDrafter):
    """Reads tokens. Subclasses load a `model` in `plan`."""

    rereads = True
    keeps_drafts = True  # what it fed itself counts as read once it came true
    _most_behind = 1  # unread tokens of a sequence, at most, before the round that comes
    model: Model

    def note(self, rows: HostRows) -> None:
        """Where the device is ahead: how many positions the round has to read, at most, before it drafts."""
        super().note(rows)
        if not rows.table.apart:
            return
        drafting = rows.slots[: rows.num_drafting]
        for slot in drafting:
            self._begin(rows.table, slot)
        self._most_behind = max([self._standing[slot].behind for slot in drafting], default=0)
        for slot in drafting:
            self._mark(rows.table, slot, rows.table.length(slot))
            self._standing[slot].behind = -1  # it reads the newest token too, which is not computed yet
        for number, (slot, size) in enumerate(zip(rows.slots, rows.sizes)):
            own = self.keeps_drafts and rows.judged and number < rows.num_drafting
            self._standing[slot].behind = 1 if own else self._standing[slot].behind + size

    def captured_as(self) -> Hashable | None:
        """How many unread tokens the round has room for; who has more is read in passes of its own."""
        left = max(0, self._most_behind - 1)
        if left > FEW:
            return None
        self._most_behind = 1 + next(room for room in (0, 8, FEW) if left <= room)
        return self._most_behind

    def read_up(self, context: Context, behind: Nodes | None = None) -> Tensor:
        """Read all committed tokens, in passes of bounded size; the logits after each newest one [B, V].

        behind: N rows more for each in the last pass, a chain behind its newest token; then the logits are
        [B, 1+N, V], those of its last row again where it has fewer.
        """
        batch = self._read_ahead(context, behind) if context.table.apart else self._read_known(context, behind)
        logits = self._logits(batch, batch.places.sampled)
        self.read[context.slots] = context.lengths.clamp(max=self._reach)
        return logits if behind is None else logits[batch.places.index]

    def read_finals(self, context: Context) -> Tensor:
        """The same, and what the head reads after each newest token [B, H]."""
        batch = self._read_ahead(context, None) if context.table.apart else self._read_known(context, None)
        finals = self.run(batch, None).final[batch.places.sampled]
        self.read[context.slots] = context.lengths.clamp(max=self._reach)
        return finals

    def feed(self, context: Context, tokens: Tensor, step: int, most: Tensor) -> Tensor:
        """Feed everyone its own draft number `step` (1 the first), tokens [B]; the logits behind it [B, V]."""
        batch = self.step_batch(context, tokens, step, most)
        return self._logits(batch, batch.places.owner)

    def _read_known(self, context: Context, behind: Nodes | None) -> Batch:
        """Where the host knows how far each has been read: exactly what is left. Answers the last pass."""
        table = context.table
        for slot in context.slot_list:
            self._begin(table, slot)
        starts = self.read[context.slots].tolist()
        lengths = [min(table.length(slot), self._reach) for slot in context.slot_list]
        starts = [min(start, length - 1) for start, length in zip(starts, lengths)]  # the newest gives the logits
        while sum(length - start for start, length in zip(starts, lengths)) > max(MAX_ROWS, len(lengths)):
            room, work = MAX_ROWS, []
            for number, (slot, length) in enumerate(zip(context.slot_list, lengths)):
                count = min(length - 1 - starts[number], room)
                if count:
                    work.append(Work(slot, starts[number], count))
                    starts[number] += count
                    room -= count
            if not work:
                break
            self._forward(self._pack(work, table, None))
        sizes = [0] * len(lengths) if behind is None else behind.sizes.tolist()
        counts = (length - start for start, length in zip(starts, lengths))
        for slot in context.slot_list:
            self._mark(table, slot, table.length(slot))
        return self._pack([Work(*item) for item in zip(context.slot_list, starts, counts, sizes)], table, behind)

    def _read_ahead(self, context: Context, behind: Nodes | None) -> Batch:
        """Where it does not: in fixed shapes. The last pass reads the two newest, and the few that are left before
        them; a row read twice is the same row."""
        batch, ends = len(context.slot_list), context.lengths.clamp(max=self._reach)
        share = max(2, MAX_ROWS // batch)
        read, left = self.read[context.slots], self._most_behind - 1
        while left > FEW:
            count = min(left, share)
            self._forward(self._pack_ahead(context, ((count, 0),) * batch, read, ends - 2))
            read, left = torch.minimum(read + count, ends - 2), left - count
        last, width = 2 + max(left, 0), 0 if behind is None else behind.tokens.shape[1]
        since = torch.minimum(read, ends - 2).clamp(min=0)  # what is read may lie in pages that others hold, too
        return self._pack_ahead(context, ((last, width),) * batch, ends - last, ends + width, behind, since)

    def _forward(self, batch: Batch) -> None:
        self.run(batch, None)

    def _logits(self, batch: Batch, rows: Tensor) -> Tensor:
        found = self.run(batch, rows).logits
        assert found is not None
        return found

    def run(self, batch: Batch, rows: Tensor | None) -> Hidden:
        """Its network over a batch; with `rows` also the logits of those."""
        self._translate(batch)
        return self.model.forward(batch, self._caches, rows=rows)

    def _translate(self, batch: Batch) -> None:
        """Target ids to the drafter's own, where they differ."""


class StateReader(CachedDrafter):
    """Reads pairs of a token and the target's state before it. Subclasses say in `read_pairs` how."""

    rereads = False
    begins = 1  # a pair belongs to its token's place, and the first token has none

    def open_cache(self, target: Target, cache: KVCache, specs: Sequence[LayerSpec], reach: int) -> None:
        super().open_cache(target, cache, specs, reach)
        self._ready = torch.zeros(target.max_num_seqs + 1, dtype=torch.bool, device=target.device)  # [S+1] it saw pairs
        self._shown: set[int] = set()  # the same where the host knows it

    def note(self, rows: HostRows) -> None:
        self._table, size = rows.table, self._cache.pool.block_size
        for slot, start, length in zip(rows.slots, rows.starts, rows.table.known_lengths(rows.slots)):
            standing = self._standing.get(slot)
            read = length if start is None else start + 1  # the pair of the token behind the last computed one is whole
            if standing is not None and read // size > standing.marked:
                self._mark(rows.table, slot, read)
        super().note(rows)
        for slot in rows.slots:
            if self._standing[slot].first is None:
                self._begin(rows.table, slot)

    def observe(self, seen: Observation) -> None:
        for batch, states in self._pair_batches(seen):
            self.read_pairs(batch, states, seen.table)
        if seen.table.rounds is None and (seen.table.apart or not self._shown.issuperset(seen.slot_list)):
            self._ready.index_fill_(0, seen.batch.slots, True)
            self._shown.update(() if seen.table.apart else seen.slot_list)

    def read_pairs(self, batch: Batch, states: Tensor, table: Slots) -> None:
        """Run rows of tokens x_{i+1}, each with the state f_i beside it, [T, W], and `keep` what drafts begin with."""
        raise NotImplementedError

    @staticmethod
    def newest_slots(batch: Batch, table: Slots) -> Tensor:
        """[T] the slot of a row that is its sequence's newest token; of any other the slot that is nobody's."""
        if batch.newest is not None:
            return batch.newest
        slots, spans = batch.layout.slots, batch.layout.spans
        if table.apart or batch.places.num_nodes or isinstance(batch.slot_list, Tensor):
            return torch.where(batch.layout.positions == table.lengths.index_select(0, slots) - 1, slots, table.null)
        newest = [table.null] * len(slots)  # the last row of each, if any
        for slot, span in zip(batch.slot_list, spans):
            if span.reach == table.length(slot):
                newest[span.row + span.num_rows - 1] = slot
        return numbers(tuple(newest))

    def keep(self, batch: Batch, table: Slots, rows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Of rows [T, W] each, those of the newest tokens by slot, in kept [S+1, W]; whose they are is ready."""
        newest = self.newest_slots(batch, table)
        if table.rounds is not None:
            table.rounds.put(newest, rows, kept, self._ready, table.null)
            return
        for made, by_slot in zip(rows, kept):
            by_slot.index_copy_(0, newest, made.to(by_slot.dtype))

    def recall(self, context: Context, kept: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`most_nodes`; and what was kept of each sequence, [B, W] each."""
        if (rounds := context.table.rounds) is not None:
            return rounds.take(context.slots, context.budgets, self._ready, kept)
        return self.most_nodes(context), [by_slot.index_select(0, context.slots) for by_slot in kept]

    def most_nodes(self, context: Context) -> Tensor:
        """[B] the budgets; 0 for a sequence whose states it has not been shown yet (it was switched on just now)."""
        if not context.table.apart and self._shown.issuperset(context.slot_list):
            return context.budgets
        return context.budgets * self._ready.index_select(0, context.slots)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            if slot in self._standing:
                self._mark(self._table, slot, self._table.length(slot))
                self._ready[slot].fill_(False)
        self._shown.difference_update(slots)
        super().forget(slots)

    def reset(self) -> None:
        super().reset()
        self._ready.zero_()
        self._shown.clear()

    def _pair_batches(self, seen: Observation) -> Iterator[tuple[Batch, Tensor]]:
        """The pairs that became whole, as rows to be run: each batch with its rows' states, f_i beside x_{i+1}."""
        table, size = seen.table, self._cache.pool.block_size
        if not table.apart and seen.before is None:  # where the host knows them, other rows need not be run
            yield from self._known_batch(seen)
            return
        if (batch := seen.pair_rows(self.first)) is not None:
            assert seen.states is not None
            yield batch, seen.states
            return
        pairs = seen.pairs()
        if seen.before is not None:
            crossing = len(seen.before.known)
            one_each = places_of(((1, 0),) * crossing, crossing, 0, table.device)
            slots, starts, ends = pairs.slots[:crossing], pairs.positions[:crossing], pairs.positions[:crossing] + 1
            reaches = [table.max_length + 1] * crossing
            given = Static(reaches, None, torch.where(pairs.valid[:crossing], ends, 0), self.first[slots])
            yield pack_rows(one_each, slots, starts, table, size, given), pairs.states[:crossing]
            pairs = Pairs(*(part[crossing:] for part in pairs))
        batch = rows_at(seen.batch, pairs.slots, pairs.positions, pairs.tokens, table)
        batch.layout.first = torch.minimum(self.first[pairs.slots], batch.layout.positions)
        if len(pairs.slots):
            yield batch, pairs.states

    def _known_batch(self, seen: Observation) -> Iterator[tuple[Batch, Tensor]]:
        """A kept row's pair belongs to the place behind it, and its token is committed: work like any other."""
        assert seen.states is not None
        known = [item for item in seen.known() if item.rows]
        rows = [row for item in known for row in item.rows]
        if rows:
            straight = rows[-1] - rows[0] == len(rows) - 1  # rows come in ascending order
            states = seen.states[rows[0] : rows[-1] + 1] if straight else seen.states[rows]
            work = [Work(item.slot, item.start + 1, len(item.rows)) for item in known]
            yield self._pack(work, seen.table, None), states
