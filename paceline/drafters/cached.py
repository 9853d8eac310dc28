"""The base of drafters that keep cache layers of their own, under the target's pages and slots.

Of each sequence it knows, by slot and on the device: `read`, how many positions its layers hold, and `first`, below
which they hold nothing of its own (a prefix hit it did not fill) and rows stay masked. The host knows when a sequence
begins, which pages were filled by this very drafter, and how far behind the target a sequence may be at most.

A drafter that needs tokens alone reads them when next it is asked to draft (`read_up`): who never drafts costs nothing.
One that needs the target's states reads the pairs it is shown in `observe`, beside the target's own rows
(`pair_batches`), and can read nothing again.

A drafter's speculative rows are disposable: they lie behind `read`, and whoever reads further writes over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters.base import Context, Observation, QuietDrafter, Target
from paceline.kernels.ops import LayerSpec
from paceline.models.base import Model
from paceline.models.batch import Batch, Nodes, Shape, Static, Work, pack, pack_rows, places_of, rows_at

MAX_ROWS = 512  # rows a single pass over unread tokens may have


@dataclass
class Standing:
    """What the host knows of one sequence."""

    behind: int  # computed positions it has not read, at most; negative: it is ahead by its own drafts
    first: int  # pages that begin before it are not its own
    marked: int  # pages up to here have been looked at and, if its own, marked


class CachedDrafter(QuietDrafter):
    """Subclasses load a `model` in `plan` and call `open_cache` in `attach`."""

    on_device = True
    rereads = True  # it needs tokens alone, so what it missed it can read later
    model: Model

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

    def observe(self, seen: Observation) -> None:
        """Keep the books."""
        for slot, start, drafted, shape in zip(
            seen.host.slots, seen.host.starts, seen.host.drafted, seen.batch.places.shape
        ):
            if slot not in self._standing:
                assert start is not None, "nothing is ahead of a sequence that is seen the first time"
                self._begin(seen.table, slot, start)
            standing = self._standing[slot]
            standing.behind = 1 if drafted else standing.behind + sum(shape)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._standing.pop(slot, None)

    def reset(self) -> None:
        self._standing.clear()

    def _begin(self, table: Slots, slot: int, start: int) -> None:
        """Where to start with a sequence whose first `start` positions it did not see computed.

        Its own pages count as read. Pages nobody else holds it may read again, if it can; what is left stays masked.
        A pair belongs to its token's place, and the first token of a text, or of a stretch it saw, has none.
        """
        pool, pages = self._cache.pool, table.pages.host[slot]
        own = alone = -(-start // pool.block_size)
        if start % pool.block_size == 0:
            while own and pool.epochs[int(pages[own - 1])] == self._epoch:
                own -= 1
        while alone and self.rereads and pool.refs(int(pages[alone - 1])) == 1:
            alone -= 1
        again = alone < own
        first = alone * pool.block_size if again else min(own * pool.block_size, start)
        read = first if again else start
        self.read[slot], self.first[slot] = read, first + (not self.rereads)
        self._standing[slot] = Standing(start - read, first, first // pool.block_size)

    def mark(self, table: Slots, slot: int) -> None:
        """It has read all that the host knows of: full pages are its own, so that a later prefix hit may use them."""
        size, standing = self._cache.pool.block_size, self._standing[slot]
        full = min(table.length(slot), self._reach) // size
        for number in range(standing.marked, full):
            if number * size >= standing.first:
                self._cache.pool.epochs[int(table.pages.host[slot, number])] = self._epoch
        standing.marked = max(standing.marked, full)

    def read_up(self, context: Context) -> Tensor:
        """Read all committed tokens, in passes of bounded size; the logits after each newest one [B, V]."""
        for slot in context.slot_list:
            if slot not in self._standing:  # it was switched on after the sequence began
                self._begin(context.table, slot, context.table.length(slot) - 1)
        behind = [self._standing[slot].behind for slot in context.slot_list]
        logits = self._read_ahead(context, behind) if context.table.apart else self._read_known(context)
        self.read[context.slots] = context.lengths.clamp(max=self._reach)
        for slot in context.slot_list:
            self._standing[slot].behind = -1
            self.mark(context.table, slot)
        return logits

    def _read_known(self, context: Context) -> Tensor:
        """Where the host knows how far each has been read: exactly what is left."""
        starts = self.read[context.slots].tolist()
        lengths = [min(context.table.length(slot), self._reach) for slot in context.slot_list]
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
            self._forward(self._pack(work, context.table, None))
        work = [Work(*item) for item in zip(context.slot_list, starts, (n - s for s, n in zip(starts, lengths)))]
        batch = self._pack(work, context.table, None)
        return self._logits(batch, batch.places.sampled)

    def _read_ahead(self, context: Context, behind: list[int]) -> Tensor:
        """Where it does not: in fixed shapes. The last pass reads the two newest; a row read twice is the same row."""
        batch, ends = len(behind), context.lengths.clamp(max=self._reach)
        share = max(2, MAX_ROWS // batch)
        read, left = self.read[context.slots], max(behind) - 1
        while left > 0:
            count = min(left, share)
            self._forward(self._pack_ahead(context, ((count, 0),) * batch, read, ends - 2))
            read, left = torch.minimum(read + count, ends - 2), left - count
        packed = self._pack_ahead(context, ((2, 0),) * batch, ends - 2, ends)
        return self._logits(packed, packed.places.sampled)

    def most_nodes(self, context: Context) -> Tensor:
        """[B] the budgets; 0 for a sequence whose states it has not been shown yet (it was switched on just now)."""
        known = [slot in self._standing for slot in context.slot_list]
        if all(known):
            return context.budgets
        return torch.where(torch.tensor(known).to(context.table.device), context.budgets, 0)

    def pair_batches(self, seen: Observation) -> Iterator[tuple[Batch, Tensor]]:
        """The pairs that became whole, as rows to be run: each batch with its rows' states, f_i beside x_{i+1}."""
        pairs, table = seen.pairs(), seen.table
        crossing = 0
        if seen.before is not None:
            crossing = len(seen.before.known)
            one_each = places_of(((1, 0),) * crossing, crossing, 0, table.device)
            slots, starts, ends = pairs.slots[:crossing], pairs.positions[:crossing], pairs.positions[:crossing] + 1
            reaches = [span.reach + 1 for span in seen.batch.layout.spans]
            given = Static(reaches, None, torch.where(pairs.valid[:crossing], ends, 0), self.first[slots])
            yield pack_rows(one_each, slots, starts, table, self._cache.pool.block_size, given), pairs.states[:crossing]
        slots = pairs.slots[crossing:]
        batch = rows_at(seen.batch, slots, pairs.positions[crossing:], pairs.tokens[crossing:], table)
        batch.layout.first = torch.minimum(self.first[slots], batch.layout.positions)
        yield batch, pairs.states[crossing:]

    def feed(self, context: Context, tokens: Tensor, step: int, most: Tensor) -> Tensor:
        """Feed everyone its own draft number `step` (1 the first), tokens [B]; the logits behind it [B, V]."""
        batch = self.step_batch(context, tokens, step, most)
        return self._logits(batch, batch.places.owner)

    def step_batch(self, context: Context, tokens: Tensor, step: int, most: Tensor) -> Batch:
        """A row for each sequence: its own draft number `step`, behind its newest token.

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

    def _pack(self, work: list[Work], table: Slots, nodes: Nodes | None) -> Batch:
        first = self.first[torch.tensor([item.slot for item in work], dtype=torch.int64)]
        return pack(work, table, self._cache.pool.block_size, nodes, first=first)

    def _pack_ahead(
        self,
        context: Context,
        shape: Shape,
        starts: Tensor,
        ends: Tensor,
        nodes: Nodes | None = None,
    ) -> Batch:
        width = 0 if nodes is None else nodes.tokens.shape[1]
        places = places_of(shape, len(shape), width, context.table.device)
        reach = context.table.longest(context.slot_list) + 1
        given = Static([reach] * len(shape), nodes, ends, self.first[context.slots])
        return pack_rows(places, context.slots, starts, context.table, self._cache.pool.block_size, given)

    def _forward(self, batch: Batch) -> None:
        self._translate(batch)
        self.model.forward(batch, self._caches)

    def _logits(self, batch: Batch, rows: Tensor) -> Tensor:
        self._translate(batch)
        found = self.model.forward(batch, self._caches, rows=rows).logits
        assert found is not None
        return found

    def _translate(self, batch: Batch) -> None:
        """Target ids to the drafter's own, where they differ."""
