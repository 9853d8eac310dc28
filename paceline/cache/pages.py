"""Pages of cache: who holds which, and which full pages can be used again by a prompt that starts the same way.

A page is a number. It is *held* (reference count above 0), *idle* (nobody holds it, but its content is known by its key
and may be shared again) or *free*. Idle pages are given away, oldest first, when free ones run out. Page 0 is none of
these: it belongs to nobody, and padding rows write there.
A key is a digest of (namespace, the key of the page before, the page's tokens), so equal keys mean equal prefixes.
The pool knows nothing of tensors, sequences or drafting.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque

Key = bytes


def page_key(parent: Key, tokens: list[int], namespace: str = "") -> Key:
    """The key of a full page; the first page of a sequence has an empty parent."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16, key=parent)
    digest.update(array("q", tokens))
    return digest.digest()


class PagePool:
    def __init__(self, num_pages: int, block_size: int) -> None:
        self.num_pages, self.block_size = num_pages, block_size
        self.reset()

    def reset(self) -> None:
        """Nothing is held and nothing is known."""
        self.epochs = [0] * (self.num_pages + 1)  # which drafter filled the page's drafter rows; 0: none
        self._refs = [0] * (self.num_pages + 1)
        self._free = deque(range(1, self.num_pages + 1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def num_rows(self) -> int:
        """Rows of a cache layer: every page's, and those of page 0."""
        return (self.num_pages + 1) * self.block_size

    @property
    def num_available(self) -> int:
        """How many pages could be taken now."""
        return len(self._free) + len(self._idle)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def take(self, count: int) -> list[int] | None:
        """`count` fresh pages, or None and nothing taken."""
        if count > self.num_available:
            return None
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._refs[page], self.epochs[page] = 1, 0
        return pages

    def _evict(self) -> int:
        """The page that has been idle longest; what it held can no longer be found."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def share(self, page: int) -> None:
        """Hold a page that is known by its key."""
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """Let go of pages, given in the order of their positions; the last ones will be given away first."""
        for page in reversed(pages):
            if self._refs[page] <= 0:
                raise AssertionError(f"page {page} was released more often than it was held")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: Key) -> None:
        """Make a full, committed page findable. The first page with a key keeps it."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def lookup(self, key: Key) -> int | None:
        return self._page_of.get(key)

    def check(self) -> None:
        """Every page is in exactly one state, and keys and pages point at each other."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & idle) and not (free & held) and not (idle & held), "a page is in two states"
        assert free | idle | held == set(range(1, self.num_pages + 1)), "a page was lost"
        assert min(self._refs, default=0) >= 0, "a reference count fell below zero"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"
        assert idle <= self._key_of.keys(), "an idle page has no key"
        assert not free & self._key_of.keys(), "a free page has a key"
