"""How many drafts come true: learned from every round, whatever it cost and however many sequences ran."""

from __future__ import annotations

from collections.abc import Sequence

HOPED = 0.7  # of drafts, before anything is known
LEAST, MOST = 4.0, 256.0  # rounds of a sequence that all the past counts
KEPT, KEPT_OWN = 1 - 1 / 32, 1 - 1 / 256  # of what is known, a round later
ENOUGH = 16.0  # rounds of a sequence that say what a tree brings
NEXT, DOUBT = 0.85, 16.0  # of how often a node is met, the one behind it may be; as so many rounds that said so


class Average:
    """A mean in which the past weighs less with every round, but never less than `least`, nor more than `MOST`."""

    def __init__(self, value: float, kept: float, least: float) -> None:
        self.value, self.kept, self.least = value, kept, least
        self.weight, self.when = 0.0, 0

    def weight_at(self, now: int) -> float:
        return min(MOST, max(self.least, self.weight * self.kept ** (now - self.when)))

    def add(self, total: float, count: int, now: int) -> None:
        weight = self.weight_at(now)
        self.value = (self.value * weight + total) / (weight + count)
        self.weight, self.when = weight + count, now


class Luck:
    """The tokens that a round of so many nodes would bring a sequence.

    Counted is how often a draft comes true whose forerunners did, by position, for sequences that might have so many:
    a round of many nodes tells what fewer would have brought. Positions that were never reached are as the one before.
    That is exact for chains. Of trees it is a guess, as deep as any of that size was accepted; what a tree of that size
    brought itself goes before it.
    """

    def __init__(self, max_nodes: int, trees: bool = False) -> None:
        self.rounds = 0  # all there were, plain ones too
        self._positions = [Average(HOPED, KEPT, LEAST) for _ in range(max_nodes)]
        self._own: dict[int, Average] | None = {} if trees else None
        self._deepest: dict[int, int] = {}  # accepted of trees of a size
        self._new: dict[int, list[int]] = {}  # by nodes and length: rounds of a sequence that are not reckoned in yet

    def learn(self, nodes: int, met: Sequence[Sequence[int]]) -> None:
        """A round in which each sequence might have `nodes`; which were accepted of each."""
        ended = self._new.setdefault(nodes, [0] * (nodes + 1))
        for path in met:
            ended[len(path)] += 1

    def _reckon(self) -> None:
        for nodes, ended in self._new.items():
            reached, depth = sum(ended), nodes
            if self._own is not None:
                met = [length for length, times in enumerate(ended) if times]
                own = self._own.setdefault(nodes, Average(0.0, KEPT_OWN, 0.0))
                own.add(sum(length * ended[length] for length in met), reached, self.rounds)
                depth = self._deepest[nodes] = max(self._deepest.get(nodes, 1), *met)
            for position, missed in zip(self._positions, ended[:depth]):
                if not reached:
                    break
                position.add(reached - missed, reached, self.rounds)
                reached -= missed
        self._new.clear()

    def tokens(self, nodes: int) -> float:
        self._reckon()
        own = None if self._own is None else self._own.get(nodes)
        if own is not None and own.weight_at(self.rounds) >= ENOUGH:
            return 1.0 + own.value
        tokens = survival = 1.0
        share = HOPED
        for position in self._positions[:nodes]:
            share = position.value if position.weight else share
            survival *= share
            tokens += survival
        return tokens


class NodeLuck:
    """The same of trees that are nested: fewer nodes are the first of more. Counted is how often each node is met, so a
    round tells what fewer nodes would have brought: exactly, or nearly, of trees that grow narrower with fewer. A node
    that was seldom there is met hardly less often than the one before it, until rounds say otherwise."""

    def __init__(self, max_nodes: int) -> None:
        self.rounds = 0
        self._nodes = [Average(0.0, KEPT_OWN, 0.0) for _ in range(max_nodes)]
        self._new: dict[int, tuple[list[int], int]] = {}  # by nodes: how often each was met, in rounds of a sequence

    def learn(self, nodes: int, met: Sequence[Sequence[int]]) -> None:
        times, count = self._new.get(nodes) or ([0] * nodes, 0)
        for path in met:
            for node in path:
                times[node] += 1
        self._new[nodes] = times, count + len(met)

    def tokens(self, nodes: int) -> float:
        for times, count in self._new.values():
            for node, number in zip(self._nodes, times):
                node.add(number, count, self.rounds)
        self._new.clear()
        tokens, guess, doubt = 1.0, HOPED, LEAST
        for node in self._nodes[:nodes]:
            weight = node.weight_at(self.rounds)
            share = (node.value * weight + guess * doubt) / (weight + doubt)
            tokens, guess, doubt = tokens + share, NEXT * share, DOUBT
        return tokens
