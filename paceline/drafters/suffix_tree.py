"""How often every short run of tokens occurs in some growing texts, and what usually follows.

Every suffix of every text, cut to `max_depth` tokens, is a path down from the root; a node's count says how often
its path occurs. Where only one suffix goes on, its path is not spelled out: a *leaf* says which text and where.

    text   a b a c        root, 4 ─┬─ a, 2 ─┬─ leaf: text from 0   (b a c)
                                   │        └─ leaf: text from 2   (c)
                                   ├─ leaf: text from 1   (b a c)
                                   └─ leaf: text from 3   (c)

So a leaf grows with its text at no cost, and a text that resembles nothing costs little more than one leaf a token.
These trees are drafted from where the compiled library is missing; where it is there, they say what its trees must say.
This module knows tokens and counts. It must not know requests, slots or drafting.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.drafters.suffix_node import (
    LEAF_BYTES,
    NODE_BYTES,
    TEXT_BYTES,
    TOKEN_BYTES,
    Leaf,
    Node,
    Text,
    by_frequency,
)

if TYPE_CHECKING:
    from paceline.cache.slots import Array


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
    """Counts over the texts begun and not yet removed; past `max_texts` or `max_bytes` the oldest are removed."""

    def __init__(self, max_depth: int, max_texts: int | None = None, max_bytes: int | None = None) -> None:
        self.max_depth = max_depth
        self.max_texts = max_texts
        self.max_bytes = max_bytes
        self.num_bytes = 0  # what texts, nodes and leaves take
        self.texts: deque[Text] = deque()
        self.root = Node(0)

    def begin(self) -> Text:
        if self.max_texts is not None and len(self.texts) >= self.max_texts:
            self._remove(self.texts.popleft())
        self.texts.append(Text())
        self.num_bytes += TEXT_BYTES
        return self.texts[-1]

    def read(self, text: Text, tokens: Array) -> None:
        self.extend(text, tokens.tolist())

    def extend(self, text: Text, tokens: Iterable[int]) -> None:
        """Append tokens to a text, O(max_depth) each at most. One that was removed stays out."""
        for token in tokens:
            if text.removed:
                return
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
            self.num_bytes += TOKEN_BYTES
            if self.max_bytes is not None and self.num_bytes > self.max_bytes:
                self._shrink(self.max_bytes)

    def _shrink(self, limit: int) -> None:
        """Remove the oldest texts; one that alone is too large goes too."""
        while self.num_bytes > limit and self.texts:
            self._remove(self.texts.popleft())

    def end(self, text: Text) -> None:
        """The text will not grow any more; it still counts."""
        text.points = []

    def _step(self, node: Node, token: int, text: Text, start: int) -> Node | None:
        """Move the end of the suffix from `start` one token down from `node`."""
        child = node.find(token)
        if child is None:
            self.num_bytes += node.add(token, Leaf(text, start)) + LEAF_BYTES
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
        self.num_bytes += NODE_BYTES
        text, below = leaf.text, leaf.start + depth
        if depth < self.max_depth and below < len(text.tokens):
            node.add(text.tokens[below], leaf)
            return node
        if depth < self.max_depth and text.points:
            text.points[leaf.start - len(text.tokens)] = node  # it ends here for now
        self.num_bytes -= self._bytes_of(leaf)  # else for good
        return node

    def _remove(self, text: Text) -> None:
        for start in range(len(text.tokens)):
            self._remove_suffix(text.tokens[start : start + self.max_depth])
        self.root.count -= len(text.tokens)
        self.num_bytes -= TEXT_BYTES + TOKEN_BYTES * len(text.tokens)
        text.removed, text.points, text.tokens = True, [], array("i")

    def _remove_suffix(self, tokens: Sequence[int]) -> None:
        node, lonely = self.root, None
        for depth, token in enumerate(tokens, start=1):
            child = node.find(token)
            assert child is not None
            if child.count == 1:  # a leaf, or a node that nothing else goes through
                self.num_bytes -= node.drop(token) + self._bytes_of(child)
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
        if isinstance(place, Node):
            if len(full) < self.max_depth:
                return
            place = Leaf(Text(full), 0)  # whose suffix it is was not kept, and no longer matters
            place.text.removed = True
        self.num_bytes += self._bytes_of(place) - self._bytes_of(node)
        parent.replace(path[-1], place)

    def _bytes_of(self, place: Node | Leaf) -> int:
        """Of a place that one suffix goes through, with all below it. A text that is only a leaf's goes with it."""
        total = 0
        while isinstance(place, Node):
            total += NODE_BYTES
            if place.best is None:
                return total
            place = place.best
        own = TEXT_BYTES + TOKEN_BYTES * len(place.text.tokens) if place.text.removed else 0
        return total + LEAF_BYTES + own

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
            return heapq.nsmallest(most, place.children(), key=by_frequency)
        only = self._next(place, depth)
        return [] if only is None else [only]
