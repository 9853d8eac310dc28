"""What a suffix tree is made of: texts, leaves and nodes, and what each of them takes in memory."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator


class Text:
    """One sequence of tokens in a tree."""

    __slots__ = ("points", "removed", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i", tokens)
        self.points: list[Node | None] = []  # where each of the last suffixes ends, longest first; None: in its leaf
        self.removed = False  # it is none of the tree's texts (any more)


class Leaf:
    """The rest of a path on which only the suffix of `text` from `start` lies."""

    __slots__ = ("start", "text")
    count = 1

    def __init__(self, text: Text, start: int) -> None:
        self.text = text
        self.start = start


class Node:
    """The end of a path. Its most frequent child has fields of its own: most nodes have one child and no table."""

    __slots__ = ("best", "count", "others", "stale", "token")

    def __init__(self, count: int) -> None:
        self.count = count
        self.token = -1  # of the best child
        self.best: Node | Leaf | None = None
        self.others: dict[int, Node | Leaf] | None = None
        self.stale = False  # a count went down: the best may not be the best

    def find(self, token: int) -> Node | Leaf | None:
        if token == self.token:
            return self.best
        return None if self.others is None else self.others.get(token)

    def add(self, token: int, child: Node | Leaf) -> int:
        """A new child; returns by how many bytes the table of others grew."""
        if self.best is None:
            self.token, self.best = token, child
            return 0
        if self.others is None:
            self.others = {}
        self.others[token] = child
        count = len(self.others)
        self.promote(token, child)
        return 0 if 1 < count < 6 else table_bytes(count) - table_bytes(count - 1)

    def replace(self, token: int, child: Node | Leaf) -> None:
        if token == self.token:
            self.best = child
        else:
            assert self.others is not None
            self.others[token] = child

    def promote(self, token: int, child: Node | Leaf) -> None:
        """Put a child whose count went up first, if that is where it belongs now; ties go to the lowest token."""
        best = self.best
        if best is child or best is None or child.count < best.count:
            return
        if child.count > best.count or token < self.token:
            assert self.others is not None
            del self.others[token]
            self.others[self.token] = best
            self.token, self.best = token, child

    def drop(self, token: int) -> int:
        """One child fewer; returns by how many bytes the table of others shrank."""
        count = 0 if self.others is None else len(self.others)
        if self.others is not None and token in self.others:
            del self.others[token]
            self.others = self.others or None
        elif self.others is None:
            self.token, self.best = -1, None
        else:
            self.token, self.best = self.others.popitem()
            self.others = self.others or None
            self.stale = True
        return table_bytes(count) - table_bytes(count - 1) if count else 0

    def most_frequent(self) -> tuple[int, Node | Leaf] | None:
        if self.best is None:
            return None
        if self.stale:
            self.stale = False
            token, child = min(self.children(), key=by_frequency)
            if child is not self.best:
                assert self.others is not None
                del self.others[token]
                self.others[self.token] = self.best
                self.token, self.best = token, child
        return self.token, self.best

    def children(self) -> Iterator[tuple[int, Node | Leaf]]:
        if self.best is not None:
            yield self.token, self.best
        if self.others is not None:
            yield from self.others.items()


def by_frequency(item: tuple[int, Node | Leaf]) -> tuple[int, int]:
    return -item[1].count, item[0]


# Bytes, as Python allocates them. A number above 256 is an object: a node holds its best child's token, a leaf its
# start, and whoever holds the leaf its token.

_NUMBER = sys.getsizeof(1000)
NODE_BYTES = sys.getsizeof(Node(0)) + _NUMBER
LEAF_BYTES = sys.getsizeof(Leaf(Text(), 0)) + 2 * _NUMBER
TEXT_BYTES = sys.getsizeof(Text()) + sys.getsizeof(array("i")) + sys.getsizeof([])
TOKEN_BYTES = array("i").itemsize
_SLOT = 3 * 8  # of a dictionary: hash, key, value
_TABLE = sys.getsizeof({0: 0}) - 8 - 5 * _SLOT


def table_bytes(count: int) -> int:
    """Of a dictionary that grew to `count` entries: a power of two of places, two thirds of them usable."""
    if count == 0:
        return 0
    places = 8 if count < 6 else 1 << ((3 * count + 1) // 2 - 1).bit_length()
    width = 1 if places <= 2**7 else 2 if places <= 2**15 else 4
    return _TABLE + places * width + 2 * places // 3 * _SLOT
