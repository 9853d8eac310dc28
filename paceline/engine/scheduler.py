"""Which sequences take part in a round, and with which pages.

First come, first served: decoding sequences always run; prompts are computed in chunks with the rows that are left, in
the order of arrival; a waiting sequence enters when a slot and the pages of its whole prompt are there, and none
overtakes one that does not fit yet. When pages run out drafts shrink first; then the newest sequence gives its pages
back and starts again later. The scheduler sees token counts and pages, never drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.cache.pages import PagePool, page_key
from paceline.cache.slots import Slots
from paceline.engine.sequence import Sequence
from paceline.models.batch import Work

Planned = tuple[Sequence, Work]


class Scheduler:
    def __init__(self, pool: PagePool, slots: Slots, max_batched_tokens: int, prefix_caching: bool) -> None:
        self.pool, self.slots = pool, slots
        self.max_batched_tokens, self.prefix_caching = max_batched_tokens, prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self._preempted = False  # in the round being scheduled
        self.num_preemptions = 0
        self.on_enter: Callable[[Sequence], None] = lambda sequence: None  # told when a slot was taken
        self.on_leave: Callable[[Sequence], None] = lambda sequence: None  # told before a slot is given back

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, max_nodes: Callable[[Sequence], int]) -> list[Planned]:
        """This round's work: decoding sequences first, then prompt chunks."""
        self._preempted = False
        decoding = self._plan_decoding(max_nodes)
        rows = sum(work.count + work.num_nodes for _, work in decoding)
        left = max(self.max_batched_tokens - rows, min(self.pool.block_size, self.max_batched_tokens))
        chunks = self._plan_chunks(left)
        left -= sum(work.count for _, work in chunks)
        if not self._preempted:  # nobody enters on pages that were just taken from another
            chunks += self._admit(left)
        alive = [item for item in decoding + chunks if item[0].slot is not None]
        for sequence, _ in alive:
            sequence.in_flight = True
        return alive

    def _plan_decoding(self, max_nodes: Callable[[Sequence], int]) -> list[Planned]:
        planned: list[Planned] = []
        for sequence in list(self.running):
            if sequence.slot is None or sequence.in_flight or sequence.num_left != 1:
                continue
            start = sequence.num_computed
            nodes = max_nodes(sequence)
            if not self._reach(sequence, start + 1 + nodes):
                held = len(sequence.pages) * self.pool.block_size
                nodes = max(0, min(nodes, held - start - 1))  # what fits into the pages it has
                if not self._reach_or_preempt(sequence, start + 1 + nodes):
                    continue
            planned.append((sequence, self._work(sequence, start, 1, nodes)))
        return planned

    def _plan_chunks(self, left: int) -> list[Planned]:
        planned: list[Planned] = []
        for sequence in list(self.running):
            if sequence.slot is None or sequence.in_flight or sequence.num_left <= 1 or left <= 0:
                continue
            count = min(sequence.num_left, left)
            if self._reach_or_preempt(sequence, sequence.num_computed + count):
                planned.append((sequence, self._work(sequence, sequence.num_computed, count, 0)))
                left -= count
        return planned

    def _admit(self, left: int) -> list[Planned]:
        planned: list[Planned] = []
        for sequence in list(self.waiting):
            if left <= 0 or not self.slots.num_free:
                break
            if _must_wait(sequence):
                continue
            if not self._enter(sequence):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            count = min(sequence.num_left, left)
            planned.append((sequence, self._work(sequence, sequence.num_computed, count, 0)))
            left -= count
        return planned

    def _enter(self, sequence: Sequence) -> bool:
        """Take the pages of the whole prompt, shared ones first, and a slot."""
        hits = self._find_prefix(sequence)
        for page in hits:
            self.pool.share(page)
        needed = -(-len(sequence.tokens) // self.pool.block_size) - len(hits)
        fresh = self.pool.take(needed)
        if fresh is None:
            self.pool.release(hits)
            return False
        slot = self.slots.take()
        sequence.slot, sequence.pages = slot, hits + fresh
        sequence.num_computed = len(hits) * self.pool.block_size
        if not sequence.stats.preemptions:  # what it finds when it comes back is its own
            sequence.stats.prefix_hit = min(sequence.num_computed, sequence.prompt_length)
        self.slots.begin(slot, sequence.tokens, sequence.prompt_length)
        self.slots.pages.write(slot, 0, sequence.pages)
        self.on_enter(sequence)
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Known pages with the same beginning; at least one token is left to compute."""
        sequence.keys = []
        if not self.prefix_caching or sequence.wants_prompt_logprobs:
            return []
        size, pages = self.pool.block_size, []
        for start in range(0, (len(sequence.tokens) - 1) // size * size, size):
            key = page_key(sequence.keys[-1] if sequence.keys else b"", sequence.tokens[start : start + size])
            page = self.pool.lookup(key)
            if page is None:
                break
            sequence.keys.append(key)
            pages.append(page)
        return pages

    def publish(self, sequence: Sequence) -> None:
        """Make the pages that are full and committed findable."""
        if not self.prefix_caching:
            return
        size = self.pool.block_size
        full = min(sequence.num_computed, len(sequence.tokens)) // size
        for number in range(len(sequence.keys), full):
            parent = sequence.keys[-1] if sequence.keys else b""
            key = page_key(parent, sequence.tokens[number * size : (number + 1) * size])
            sequence.keys.append(key)
            self.pool.publish(sequence.pages[number], key)

    def leave(self, sequence: Sequence) -> None:
        """Give back slot and pages; the sequence is finished, aborted or about to wait again."""
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.on_leave(sequence)
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self.slots.give_back(sequence.slot)
        sequence.slot, sequence.pages, sequence.keys, sequence.num_computed = None, [], [], 0

    def _preempt(self, sequence: Sequence) -> None:
        self.leave(sequence)
        self._preempted = True
        self.num_preemptions += 1
        sequence.stats.preemptions += 1
        self.waiting.appendleft(sequence)

    def _reach(self, sequence: Sequence, positions: int) -> bool:
        """See to it that the sequence has pages for this many positions."""
        missing = -(-positions // self.pool.block_size) - len(sequence.pages)
        if missing <= 0:
            return True
        pages = self.pool.take(missing)
        if pages is None:
            return False
        assert sequence.slot is not None
        self.slots.pages.write(sequence.slot, len(sequence.pages), pages)
        sequence.pages += pages
        return True

    def _reach_or_preempt(self, sequence: Sequence, positions: int) -> bool:
        """The same, taking pages from the newest sequences if need be: at last from this one itself."""
        while not self._reach(sequence, positions):
            victims = [other for other in self.running if not other.in_flight and other.slot is not None]
            victim = victims[-1] if victims else sequence
            if victim is sequence and len(self.running) == 1:
                return False  # pages are held by rounds in flight; try again next round
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    @staticmethod
    def _work(sequence: Sequence, start: int, count: int, nodes: int) -> Work:
        assert sequence.slot is not None
        return Work(sequence.slot, start, count, nodes)


def _must_wait(sequence: Sequence) -> bool:
    """Samples of one request wait until the first has computed the prompt they share."""
    leader = sequence.leader
    if leader is None or leader.finish_reason is not None or leader.aborted:
        return False
    return leader.slot is None or leader.num_computed < leader.prompt_length


__all__ = ["Planned", "Scheduler"]
