"""The page pool against a model that is a few dictionaries, and keys against the prefixes they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cache.pages import PagePool, page_key

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of pages, as sequences have them; `known` is what lookup must answer."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, 4)
        self.holders: list[list[int]] = []
        self.known: dict[bytes, int] = {}
        self.idle: list[int] = []  # in the order in which they became idle

    def refs(self, page: int) -> int:
        return sum(holder.count(page) for holder in self.holders)

    def settle(self, page: int) -> None:
        if self.refs(page) == 0 and page in self.known.values():
            self.idle.append(page)

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def take(self, count: int) -> None:
        held = {page for holder in self.holders for page in holder}
        free = NUM_PAGES - len(held) - len(self.idle)
        pages = self.pool.take(count)
        if count > free + len(self.idle):
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count
        assert not set(pages) & held and 0 not in pages, "page 0 belongs to nobody"
        evicted = [page for page in pages if page in self.idle]
        assert evicted == self.idle[: max(0, count - free)], "idle pages go oldest first, and only when none is free"
        self.idle = self.idle[len(evicted) :]
        self.known = {key: page for key, page in self.known.items() if page not in evicted}
        assert all(self.pool.epochs[page] == 0 for page in pages), "a fresh page is no drafter's"
        for page in pages:
            self.pool.epochs[page] = 9
        if pages:
            self.holders.append(pages)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        page = self.pool.lookup(key)
        assert page == self.known[key]
        epoch = self.pool.epochs[page]
        self.pool.share(page)
        assert self.pool.epochs[page] == epoch, "a shared page keeps what a drafter wrote there"
        if page in self.idle:
            self.idle.remove(page)
        self.holders.append([page])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)
        for page in reversed(pages):
            self.settle(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders))))
        self.pool.publish(page, key)
        if key not in self.known and page not in self.known.values():
            self.known[key] = page

    @precondition(lambda self: self.known)
    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.holders, self.known, self.idle = [], {}, []
        assert set(self.pool.epochs) == {0}

    @rule(key=st.binary(min_size=1, max_size=1))
    def lookup(self, key: bytes) -> None:
        assert self.pool.lookup(key) == self.known.get(key)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        numbers = range(NUM_PAGES + 1)
        assert [self.pool.refs(page) for page in numbers] == [self.refs(page) for page in numbers]
        held = {page for holder in self.holders for page in holder}
        assert self.pool.num_available == NUM_PAGES - len(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_releasing_a_page_nobody_holds_is_refused() -> None:
    pool = PagePool(2, 4)
    (page,) = pool.take(1) or []
    pool.release([page])
    with pytest.raises(AssertionError, match=f"page {page} was released more often"):
        pool.release([page])


def test_the_last_pages_of_a_sequence_are_given_away_first() -> None:
    pool = PagePool(3, 4)
    pages = pool.take(3)
    assert pages is not None
    for number, page in enumerate(pages):
        pool.publish(page, bytes([number]))
    pool.release(pages)
    assert [pool.take(1) for _ in pages] == [[page] for page in reversed(pages)]


def test_check_notices_a_page_that_was_lost() -> None:
    pool = PagePool(3, 4)
    pool._free.popleft()
    with pytest.raises(AssertionError, match="a page was lost"):
        pool.check()


def test_a_layer_has_rows_for_every_page_and_for_the_page_of_nobody() -> None:
    pool = PagePool(3, 4)
    pages = pool.take(3)
    assert pages is not None and sorted(pages) == [1, 2, 3] and pool.take(1) is None
    assert pool.num_rows == 16 and max(page * 4 + 3 for page in pages) == pool.num_rows - 1


tokens = st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), min_size=1, max_size=4)


def chain(pages: list[list[int]], namespace: str = "") -> bytes:
    key = b""
    for page in pages:
        key = page_key(key, page, namespace)
    return key


@given(tokens, tokens, st.sampled_from(["", "adapter"]), st.sampled_from(["", "adapter"]))
@settings(max_examples=150, deadline=None)
def test_keys_are_equal_exactly_when_namespace_and_whole_prefix_are(
    first: list[list[int]], second: list[list[int]], ours: str, theirs: str
) -> None:
    assert (chain(first, ours) == chain(second, theirs)) == ((first, ours) == (second, theirs))
    assert chain([*first, second[0]]) != chain([*first, *first, second[0]]), "the same page after another prefix"


def test_a_key_depends_on_the_order_and_on_where_pages_are_cut() -> None:
    assert page_key(b"", [1, 2, 3]) != page_key(b"", [3, 2, 1])
    assert chain([[1, 2, 3], [4, 5, 6]]) != chain([[1, 2], [3, 4, 5, 6]])
    assert page_key(b"", [1]) == page_key(b"", [1]) and len(page_key(b"", [1])) == 16
