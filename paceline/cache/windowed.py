"""The pages of layers that look back only so far: a sequence holds those that its next rows can see, and no others.

Such layers have a pool and a page table of their own. The table has the same columns as the other (a page's number is
its positions divided by the page size), so that kernels only pick another table; pages that were given back are page 0
in it. A page that was given back is found by its key until somebody else takes it.
This module knows page numbers, nothing of tensors in layers, of scheduling or drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cache.pages import Key, PagePool
from paceline.cache.slots import Slots, Table


@dataclass
class Held:
    """What one sequence holds: neighbours, from page number `first` on."""

    first: int
    pages: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class WindowPages:
    """width: how many positions the widest window shows, the row's own included."""

    def __init__(self, slots: Slots, pool: PagePool, width: int) -> None:
        self.pool, self.width = pool, width
        rows, columns = slots.pages.host.shape
        self.table = Table(rows, columns, slots.device, slots.apart)
        self.held: dict[int, Held] = {}  # by slot

    def _first(self, position: int) -> int:
        """The number of the first page that a row at `position`, or behind it, can see."""
        return max(0, position - self.width + 1) // self.pool.block_size

    def find(self, keys: list[Key]) -> int:
        """How many of a prefix's pages, from the first on, a hit may have: of those that the row behind them sees each
        must be there."""
        count = low = len(keys)
        while low > self._first(count * self.pool.block_size):
            low -= 1
            if self.pool.lookup(keys[low]) is None:
                count = low
        return count

    def has_room(self, length: int, rows: int) -> bool:
        """Whether a sequence of that length can enter, wherever a hit ends, with so many rows to compute first."""
        size = self.pool.block_size
        return min(-(-length // size), -(-(self.width + rows) // size) + 2) <= self.pool.num_available

    def enter(self, slot: int, keys: list[Key], positions: int) -> bool:
        """Share what is seen behind a hit that `find` allowed, and take what else so many positions need; False: some
        of it is missing."""
        computed = len(keys) * self.pool.block_size
        first = self._first(computed)
        pages = [self._shared(key) for key in keys[first:]]
        self.held[slot] = Held(first, pages)
        self.table.write(slot, 0, [0] * first + pages)
        return self.reach(slot, computed, positions)

    def _shared(self, key: Key) -> int:
        page = self.pool.lookup(key)
        assert page is not None, "a hit's page is gone"
        self.pool.share(page)
        return page

    def reach(self, slot: int, computed: int, positions: int) -> bool:
        """Give back what no row from position `computed` on can see, and see to it that pages up to `positions` are
        there. Called when nothing that was launched can still write to the former."""
        held = self.held[slot]
        gone = self._first(computed) - held.first
        if gone > 0:
            self.pool.release(held.pages[:gone])
            self.table.write(slot, held.first, [0] * gone)
            held.first, held.pages = held.first + gone, held.pages[gone:]
        missing = -(-positions // self.pool.block_size) - held.end
        fresh = self.pool.take(max(0, missing))
        if fresh is None:
            return False
        self.table.write(slot, held.end, fresh)
        held.pages += fresh
        return True

    def publish(self, slot: int, number: int, key: Key) -> None:
        """The sequence's page of that number is full and committed."""
        held = self.held[slot]
        self.pool.publish(held.pages[number - held.first], key)

    def leave(self, slot: int) -> None:
        self.pool.release(self.held.pop(slot).pages)

    def reset(self) -> None:
        self.pool.reset()
        self.held.clear()

    def check(self) -> None:
        """Pages are where the books say, in the pool and in the table."""
        self.pool.check()
        held = [page for one in self.held.values() for page in one.pages]
        for page in range(1, self.pool.num_pages + 1):
            assert self.pool.refs(page) == held.count(page), f"page {page} is not held as often as it says"
        for slot, one in self.held.items():
            assert self.table.host[slot, : one.end].tolist() == [0] * one.first + one.pages, "the table says otherwise"
