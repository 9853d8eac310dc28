"""How often every short run of tokens occurs in some growing texts, and what usually follows.

Every suffix of every text, cut to `max_depth` tokens, is a path down from the root; a node's count says how often
its path occurs. Where only one suffix goes on, its path is not spelled out: a *leaf* says which text and where.

    text   a b a c        root, 4 ─┬─ a, 2 ─┬─ leaf: text from 0   (b a c)
                                   │        └─ leaf: text from 2   (c)
                                   ├─ leaf: text from 1   (b a c)
                                   └─ leaf: text from 3   (c)

So a leaf grows with its text at no cost, and a text that resembles nothing costs little more than one leaf a token.
This module knows tokens and counts. It must not know requests, slots or drafting.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


class Text:
    """One sequence of tokens in a tree."""

    __slots__ = ("points", "removed", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i", tokens)
        self.points: list[Node | None] = []  # where each of the last suffixes ends, longest first; None: in its leaf
        self.removed = False


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

    def add(self, token: int, child: Node | Leaf) -> None:
        if self.best is None:
            self.token, self.best = token, child
            return
        if self.others is None:
            self.others = {}
        self.others[token] = child
        self.promote(token, child)

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

    def drop(self, token: int) -> None:
        if self.others is not None and token in self.others:
            del self.others[token]
            self.others = self.others or None
        elif self.others is None:
            self.token, self.best = -1, None
        else:
            self.token, self.best = self.others.popitem()
            self.others = self.others or None
            self.stale = True

    def most_frequent(self) -> tuple[int, Node | Leaf] | None:
        if self.best is None:
            return None
        if self.stale:
            self.stale = False
            token, child = min(self.children(), key=_by_frequency)
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


def _by_frequency(item: tuple[int, Node | Leaf]) -> tuple[int, int]:
    return -item[1].count, item[0]


@dataclass
class Draft:
    """What a tree expects to follow: nodes, each with the probability of its path by counts."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # -1: the last token of the text
    score: float = 0.0  # the sum of the probabilities: how many tokens are expected to be right
    match: int = 0  # how many tokens of the text were found

    def add(self, token: int, parent: int, probability: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.score += probability


@dataclass(frozen=True)
class Limits:
    """How far to trust the counts."""

    max_tokens: int
    factor: float = 1.0  # a match of p tokens is worth at most floor(factor · p) nodes
    min_probability: float = 0.1
    branching: bool = False


class SuffixTree:
    """Counts over the texts begun and not yet removed; past `max_texts` the oldest is removed."""

    def __init__(self, max_depth: int, max_texts: int | None = None) -> None:
        self.max_depth = max_depth
        self.max_texts = max_texts
        self.texts: deque[Text] = deque()
        self.root = Node(0)

    def begin(self) -> Text:
        if self.max_texts is not None and len(self.texts) >= self.max_texts:
            self._remove(self.texts.popleft())
        self.texts.append(Text())
        return self.texts[-1]

    def extend(self, text: Text, tokens: Iterable[int]) -> None:
        """Append tokens to a text, O(max_depth) each at most. One that was removed stays out."""
        if text.removed:
            return
        for token in tokens:
            text.tokens.append(token)
            points = text.points
            points.append(self.root)
            if len(points) > self.max_depth:
                del points[0]
            start = len(text.tokens) - len(points)
            for i, node in enumerate(points):
                if node is not None:
                    points[i] = self._step(node, token, text, start + i)
            self.root.count += 1

    def end(self, text: Text) -> None:
        """The text will not grow any more; it still counts."""
        text.points = []

    def _step(self, node: Node, token: int, text: Text, start: int) -> Node | None:
        """Move the end of the suffix from `start` one token down from `node`."""
        child = node.find(token)
        if child is None:
            node.add(token, Leaf(text, start))
            return None
        if isinstance(child, Leaf):
            child = self._spell_out(node, token, child, depth=len(text.tokens) - start)
        child.count += 1
        if child is not node.best:
            node.promote(token, child)
        return child

    def _spell_out(self, parent: Node, token: int, leaf: Leaf, depth: int) -> Node:
        """Make the first token of a leaf, which lies at `depth`, a node; what remains of the leaf moves below it."""
        node = Node(1)
        parent.replace(token, node)
        text, below = leaf.text, leaf.start + depth
        if depth == self.max_depth:
            pass  # the leaf's suffix ends here for good
        elif below < len(text.tokens):
            node.add(text.tokens[below], leaf)
        elif text.points:
            text.points[leaf.start - len(text.tokens)] = node  # it ends here for now
        return node

    def _remove(self, text: Text) -> None:
        for start in range(len(text.tokens)):
            self._remove_suffix(text.tokens[start : start + self.max_depth])
        self.root.count -= len(text.tokens)
        text.removed, text.points = True, []

    def _remove_suffix(self, tokens: Sequence[int]) -> None:
        node, lonely = self.root, None
        for depth, token in enumerate(tokens, start=1):
            child = node.find(token)
            assert child is not None
            if child.count == 1:
                node.drop(token)  # a leaf, or a node that nothing else goes through
                break
            assert isinstance(child, Node)
            child.count -= 1
            node.stale = node.stale or child is node.best
            if child.count == 1 and lonely is None:
                lonely = node, tokens[:depth], child
            node = child
        if lonely is not None:
            self._fold(*lonely)

    def _fold(self, parent: Node, path: Sequence[int], node: Node) -> None:
        """Undo the spelling out of a path that one suffix is left on, unless that suffix is short and may yet grow."""
        place: Node | Leaf = node
        full = array("i", path)
        while isinstance(place, Node) and place.best is not None:
            full.append(place.token)
            place = place.best
        if isinstance(place, Leaf):
            parent.replace(path[-1], place)
        elif len(full) == self.max_depth:  # whose suffix it is was not kept, and no longer matters
            parent.replace(path[-1], Leaf(Text(full), 0))

    def _match(self, tokens: array[int]) -> Node | Leaf | None:
        """Where the path `tokens` ends."""
        node = self.root
        for depth, token in enumerate(tokens):
            child = node.find(token)
            if child is None:
                return None
            if isinstance(child, Leaf):
                start = child.start
                same = child.text.tokens[start + depth : start + len(tokens)] == tokens[depth:]
                return child if same else None
            node = child
        return node

    def count(self, tokens: Sequence[int]) -> int:
        """How often a run of at most max_depth tokens occurs."""
        place = self._match(array("i", tokens)) if len(tokens) <= self.max_depth else None
        return 0 if place is None else place.count

    def speculate(self, text: Sequence[int], limits: Limits) -> Draft:
        """The best draft over all lengths of suffix of `text` that are found; of equals, the longest match's."""
        expand = self._grow if limits.branching else self._follow
        best = Draft()
        places = self._places(array("i", text[-self.max_depth :]))
        for match in range(len(places), 0, -1):
            budget = min(limits.max_tokens, int(limits.factor * match))
            if budget <= best.score:
                break  # certainty for every node would not beat it, here or with a shorter match
            if not limits.branching and self.max_depth - match <= best.score:
                continue  # nor would it for the nodes of a chain down to the full depth
            draft = Draft(match=match)
            expand(draft, places[match - 1], budget, limits.min_probability)
            if draft.score > best.score:
                best = draft
        return best

    def _places(self, tail: array[int]) -> list[Node | Leaf]:
        """Where the last 1, 2, … tokens end, as long as anything follows them; never all of `tail`."""
        places: list[Node | Leaf] = []
        for match in range(1, len(tail)):
            place = self._match(tail[-match:])
            if place is None or self._next(place, match) is None:
                break  # nothing follows it anywhere, so nothing follows a longer one
            places.append(place)
        return places

    def _next(self, place: Node | Leaf, depth: int) -> tuple[int, Node | Leaf] | None:
        """The most frequent child of a place at `depth`."""
        if isinstance(place, Node):
            return place.most_frequent()
        below = place.start + depth
        if depth < self.max_depth and below < len(place.text.tokens):
            return place.text.tokens[below], place
        return None

    def _follow(self, draft: Draft, place: Node | Leaf, budget: int, floor: float) -> None:
        """A chain: always the most frequent child."""
        probability = 1.0
        while len(draft.tokens) < budget:
            step = self._next(place, draft.match + len(draft.tokens))
            if step is None:
                return
            token, child = step
            probability *= child.count / place.count
            if probability < floor:
                return
            draft.add(token, len(draft.tokens) - 1, probability)
            place = child

    def _grow(self, draft: Draft, place: Node | Leaf, budget: int, floor: float) -> None:
        """A tree: always the node with the most probable path; of equals, the one met first."""
        heap: list[tuple[float, int, int, int, int, Node | Leaf]] = []  # -probability, order, depth, parent, token
        order, probability, depth, parent = 0, 1.0, draft.match, -1
        while len(draft.tokens) < budget:
            for token, child in self._all_next(place, depth, most=budget - len(draft.tokens)):
                path = probability * (child.count / place.count)
                if path < floor:
                    break
                heapq.heappush(heap, (-path, order, depth + 1, parent, token, child))
                order += 1
            if not heap:
                return
            negative, _, depth, above, token, place = heapq.heappop(heap)
            probability, parent = -negative, len(draft.tokens)
            draft.add(token, above, probability)

    def _all_next(self, place: Node | Leaf, depth: int, most: int) -> list[tuple[int, Node | Leaf]]:
        """The `most` most frequent children of a place at `depth`, the most frequent first."""
        if isinstance(place, Node) and place.others is not None:
            return heapq.nsmallest(most, place.children(), key=_by_frequency)
        only = self._next(place, depth)
        return [] if only is None else [only]
