"""Which sequences take part in a round, and with which pages.

First come, first served: decoding sequences always run; prompts are computed in chunks with the rows that are left, in
the order of arrival; a waiting sequence enters when a slot and the pages of its whole prompt are there, and none
overtakes one that does not fit yet. When pages run out drafts shrink first; then the newest sequence gives its pages
back and starts again later. The scheduler sees token counts and pages, never drafts.

Rounds may be ahead of what is known of a sequence: then its pages reach as far as those rounds could take it, and none
is taken from anybody before they have been read (`MustRead`). Nor does a drafter on the host draft before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.cache.pages import PagePool, page_key
from paceline.cache.slots import Slots
from paceline.engine.sequence import Planned, Sequence
from paceline.models.batch import Work


class MustRead(Exception):
    """Rounds are in flight, and pages have run out or a drafter waits for them: read those, then schedule again."""


class Scheduler:
    def __init__(self, pool: PagePool, slots: Slots, max_batched_tokens: int, prefix_caching: bool) -> None:
        self.pool, self.slots = pool, slots
        self.max_batched_tokens, self.prefix_caching = max_batched_tokens, prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.beyond = 0  # positions behind those a round computes that the drafter writes to
        self.waits = False  # the drafter proposes on the host, for sequences that nothing is ahead of
        self._preempted = False  # in the round being scheduled
        self.num_preemptions = 0
        self.on_enter: Callable[[Sequence], None] = lambda sequence: None  # told when a slot was taken
        self.on_leave: Callable[[Sequence], None] = lambda sequence: None  # told before a slot is given back

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, budget: int) -> list[Planned]:
        """This round's work: decoding sequences, with drafts of at most `budget` nodes, then prompt chunks."""
        self._preempted = False
        planned, prompts = self._plan_decoding(budget)
        if prompts or self.waiting:
            rows = sum([work.count + work.num_nodes for _, work in planned])
            left = max(self.max_batched_tokens - rows, min(self.pool.block_size, self.max_batched_tokens))
            chunks = self._plan_chunks(prompts, left)
            if not self._preempted:  # nobody enters on pages that were just taken from another
                chunks += self._admit(left - sum([work.count for _, work in chunks]))
            planned += chunks
        return [item for item in planned if item[0].slot is not None] if self._preempted else planned

    def _plan_decoding(self, budget: int) -> tuple[list[Planned], list[Sequence]]:
        """And who is at its prompt still."""
        planned: list[Planned] = []
        prompts: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.slot is None or sequence.finish_reason is not None:
                continue
            start, most, room = sequence.outlook()
            if start is not None and start + 1 != most:
                prompts.append(sequence)
                continue
            if room <= 0:  # what is ahead will finish it
                continue
            nodes = sequence.most_nodes(budget, room + self.slots.spread)
            if nodes and start is None and self.waits:
                raise MustRead
            need = min(most + self.beyond, sequence.max_length) if self.beyond else most
            if not self._reach(sequence, min(need + nodes, sequence.max_length + self.slots.spread) if nodes else need):
                held = len(sequence.pages) * self.pool.block_size
                nodes = max(0, min(nodes, held - need))  # what fits into the pages it has
                if not self._reach_or_preempt(sequence, need):
                    continue
            if sequence.work != (sequence.slot, start, 1, nodes):  # else it is the very same, and so may the plan be
                sequence.work = Work(sequence.slot, start, 1, nodes)
            planned.append((sequence, sequence.work))
        return planned, prompts

    def _plan_chunks(self, prompts: list[Sequence], left: int) -> list[Planned]:
        planned: list[Planned] = []
        for sequence in prompts:
            if sequence.slot is None or left <= 0:  # preempted meanwhile
                continue
            count = min(len(sequence.tokens) - sequence.num_launched, left)
            if self._reach_or_preempt(sequence, sequence.num_launched + count + self.beyond):
                planned.append((sequence, Work(sequence.slot, sequence.num_launched, count)))
                left -= count
        return planned

    def _admit(self, left: int) -> list[Planned]:
        planned: list[Planned] = []
        for sequence in list(self.waiting):
            if left <= 0 or not self.slots.num_free:
                break
            if sequence.leader is not None and _must_wait(sequence.leader):
                continue
            if not self._enter(sequence):
                break
            self.running.append(sequence)  # first the new list, then the old: nobody is ever in neither
            self.waiting.remove(sequence)
            if sequence.finish_reason is not None:  # it could not be started
                continue
            assert sequence.slot is not None
            count = min(len(sequence.tokens) - sequence.num_launched, left)
            planned.append((sequence, Work(sequence.slot, sequence.num_computed, count)))
            left -= count
        return planned

    def _enter(self, sequence: Sequence) -> bool:
        """Take the pages of the whole prompt, shared ones first, and a slot."""
        hits = self._find_prefix(sequence)
        for page in hits:
            self.pool.share(page)
        fresh = self.pool.take(-(-(len(sequence.tokens) + self.beyond) // self.pool.block_size) - len(hits))
        if fresh is None:
            self.pool.release(hits)
            return False
        slot = self.slots.take()
        sequence.slot, sequence.pages = slot, hits + fresh
        sequence.num_computed = sequence.num_launched = len(hits) * self.pool.block_size
        if not sequence.stats.preemptions:  # what it finds when it comes back is its own
            sequence.stats.prefix_hit = min(sequence.num_computed, sequence.prompt_length)
        self.slots.begin(slot, sequence.tokens, sequence.prompt_length, sequence.max_length)
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
        """Make the pages that are full, and known to be, findable."""
        if not self.prefix_caching:
            return
        size = self.pool.block_size
        for number in range(len(sequence.keys), sequence.num_computed // size):
            parent = sequence.keys[-1] if sequence.keys else b""
            key = page_key(parent, sequence.tokens[number * size : (number + 1) * size])
            sequence.keys.append(key)
            self.pool.publish(sequence.pages[number], key)

    def leave(self, sequence: Sequence) -> None:
        """Give back slot and pages; the sequence is finished or about to wait again, and no round is ahead of it."""
        assert not sequence.ahead, "a round in flight may still write to these pages"
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.on_leave(sequence)
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self.slots.give_back(sequence.slot)
        sequence.slot, sequence.pages, sequence.keys = None, [], []
        sequence.num_computed = sequence.num_launched = 0

    def describe_stall(self) -> str:
        """Why nothing can be planned though there is work."""
        return (
            f"{len(self.waiting)} sequences wait and {len(self.running)} run, but no work can be planned with "
            f"{self.pool.num_available} of {self.pool.num_pages} pages and "
            f"{self.slots.num_free} of {self.slots.num_slots} slots free"
        )

    def reset(self) -> None:
        """Start over from the sequences alone: all wait again, in their order, whatever the books say."""
        again = [sequence for sequence in self.running if sequence.finish_reason is None]
        waiting = [sequence for sequence in self.waiting if sequence not in again]
        for sequence in (*self.running, *self.waiting):
            sequence.slot, sequence.pages, sequence.keys, sequence.ahead = None, [], [], []
            sequence.num_computed = sequence.num_launched = 0
        self.running, self.waiting = [], deque([*again, *waiting])
        self.pool.reset()
        self.slots.reset()

    def _preempt(self, sequence: Sequence) -> None:
        self.waiting.appendleft(sequence)
        self.leave(sequence)
        self._preempted = True
        self.num_preemptions += 1
        sequence.stats.preemptions += 1

    def _reach(self, sequence: Sequence, positions: int) -> bool:
        """See to it that the sequence has pages for this many positions."""
        size, held = self.pool.block_size, len(sequence.pages)
        if positions <= held * size:
            return True
        pages = self.pool.take(-(-positions // size) - held)
        if pages is None:
            return False
        assert sequence.slot is not None
        self.slots.pages.write(sequence.slot, held, pages)
        sequence.pages += pages
        return True

    def _reach_or_preempt(self, sequence: Sequence, positions: int) -> bool:
        """The same, taking pages from the newest sequences if need be: at last from this one itself."""
        while not self._reach(sequence, positions):
            if any(other.ahead for other in self.running):
                raise MustRead
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True


def _must_wait(leader: Sequence) -> bool:
    """Samples of one request wait until the first has computed the prompt they share."""
    if leader.finish_reason is not None:
        return False
    return leader.slot is None or leader.num_computed < leader.prompt_length


__all__ = ["MustRead", "Planned", "Scheduler"]
