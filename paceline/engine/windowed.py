"""The scheduler of targets whose layers look back only so far: it asks two pools.

What it adds is bookkeeping beside the pages of all positions: whoever runs holds the pages its windows show, a prefix
is found as far as both kinds of pages know it, and when either runs out drafts shrink and the newest starts again.
"""

from __future__ import annotations

from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence


class WindowedScheduler(Scheduler):
    def __init__(self, pool: PagePool, slots: Slots, max_batched_tokens: int, prefix_caching: bool) -> None:
        super().__init__(pool, slots, max_batched_tokens, prefix_caching)
        assert slots.windowed is not None, "no layer has pages of its own"
        self.windowed = slots.windowed

    def publish(self, sequence: Sequence) -> None:
        known = len(sequence.keys)
        super().publish(sequence)
        assert sequence.slot is not None
        for number, key in enumerate(sequence.keys[known:], known):
            self.windowed.publish(sequence.slot, number, key)

    def leave(self, sequence: Sequence) -> None:
        slot = sequence.slot
        super().leave(sequence)
        if slot is not None:
            self.windowed.leave(slot)

    def reset(self) -> None:
        super().reset()
        self.windowed.reset()

    def describe_stall(self) -> str:
        pool = self.windowed.pool
        return f"{super().describe_stall()}; under windows {pool.num_available} of {pool.num_pages} pages"

    def _enter(self, sequence: Sequence) -> bool:
        """The pages of the first rows are taken: as many as these could need are there, or it does not enter."""
        length, rows = len(sequence.tokens) + self.beyond, self.max_batched_tokens + self.beyond
        if not self.windowed.has_room(length, rows) or not super()._enter(sequence):
            return False
        assert sequence.slot is not None
        entered = self.windowed.enter(sequence.slot, sequence.keys, min(length, sequence.num_computed + rows))
        assert entered, "there was room"
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        pages = super()._find_prefix(sequence)
        del sequence.keys[self.windowed.find(sequence.keys) :]
        return pages[: len(sequence.keys)]

    def _reach(self, sequence: Sequence, positions: int) -> bool:
        """Here, where nothing that a round decided is still to be moved, pages out of sight are given back.

        Those under windows come first: for whoever decodes they reach no less far than the others, by which drafts are
        shrunk.
        """
        assert sequence.slot is not None
        if not self.windowed.reach(sequence.slot, sequence.num_computed, positions):
            return False
        return super()._reach(sequence, positions)
