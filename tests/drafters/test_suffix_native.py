"""The library's suffix trees against those in Python: the same counts and the same drafts, floats included."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.cache.slots import Slots
from paceline.drafters import suffix
from paceline.drafters.base import Context, Observation, QuietDrafter
from paceline.drafters.suffix import Suffix, SuffixDrafter
from paceline.drafters.suffix_tree import Draft, Limits, SuffixTree
from paceline.drafters.tree import Proposal
from paceline.kernels.cpu import suffix as native
from paceline.kernels.cpu.suffix import NativeTree
from tests.native import needs_native

pytestmark = needs_native
CPU = torch.device("cpu")


def read(tree: NativeTree | SuffixTree, text: object, tokens: list[int]) -> None:
    tree.read(text, np.array(tokens, dtype=np.int64))  # type: ignore[arg-type]


def drafts_of(own: list[NativeTree], others: NativeTree | None, texts: list[list[int]], limits: Limits) -> list[Draft]:
    """What the library says of each text, with the padding checked."""
    host = np.zeros((len(texts), max(1, *map(len, texts))), dtype=np.int64)
    for row, text in zip(host, texts):
        row[: len(text)] = text
    rows = [(b, len(text), limits.max_tokens) for b, text in enumerate(texts)]
    found = native.speculate(own, others, host, rows, limits, CPU)
    drafts = []
    for b, size in enumerate(found.sizes.tolist()):
        assert not found.tokens[b, size:].any() and (found.parents[b, size:] == -2).all()
        tokens, parents = found.tokens[b, :size].tolist(), found.parents[b, :size].tolist()
        drafts.append(Draft(tokens, parents, found.scores[b], found.matches[b]))
    return drafts


@dataclass
class Pair:
    """The same tree twice."""

    python: SuffixTree
    native: NativeTree

    @classmethod
    def of(cls, max_depth: int, max_texts: int | None = None) -> Pair:
        return cls(SuffixTree(max_depth, max_texts), NativeTree(max_depth, max_texts))

    def compare(self, rng: random.Random, seen: list[int], alphabet: int) -> int:
        """How many nodes both drafted behind some text, after some counts."""
        for _ in range(4):
            start = rng.randrange(len(seen) + 1)
            run = seen[start : start + rng.randint(0, self.python.max_depth + 1)]
            run += [rng.randrange(alphabet)] * (rng.random() < 0.2)
            assert self.native.count(run) == self.python.count(run)
        drafted = 0
        for branching in (False, True):
            end = rng.randrange(len(seen) + 1)
            context = [*seen[max(0, end - rng.randint(1, 30)) : end], *[rng.randrange(alphabet)] * rng.randint(0, 1)]
            factor, floor = rng.choice([0.5, 1.0, 1.7, 4.0]), rng.choice([0.0, 0.01, 0.1, 0.5, 1.0])
            limits = Limits(rng.randint(1, 14), factor, floor, branching)
            draft = self.python.speculate(context, limits)
            assert drafts_of([self.native], None, [context], limits) == [draft]
            drafted += len(draft.tokens)
        return drafted


@pytest.mark.parametrize("alphabet", [2, 3, 6, 60])
def test_random_programs_leave_both_trees_alike_after_every_step(alphabet: int) -> None:
    """Texts begin, grow in turns, end and are removed; those that were removed are told more, in vain."""
    drafted = removed = 0
    for seed in range(40):
        rng = random.Random(f"{alphabet} {seed}")
        pair = Pair.of(rng.randint(2, 10), rng.choice([None, 1, 2, 3, 5]))
        texts, seen, begun = [], [0], 0
        for _ in range(50):
            step = rng.random()
            if step < 0.2 or not texts:
                texts.append((pair.python.begin(), pair.native.begin()))
                begun += 1
            elif step < 0.9:
                here, there = rng.choice(texts)
                more = [rng.randrange(alphabet) for _ in range(rng.randint(1, 20))]
                if rng.random() < 0.4:  # what was said before
                    start = rng.randrange(len(seen))
                    more = seen[start : start + 30]
                read(pair.python, here, more)
                read(pair.native, there, more)
                seen = (seen + more)[-300:]
            else:
                here, there = texts.pop(rng.randrange(len(texts)))
                pair.python.end(here)
                pair.native.end(there)
            drafted += pair.compare(rng, seen, alphabet)
        removed += begun - len(pair.python.texts)
    assert drafted > 1000 and removed > 100


def test_a_node_of_many_children_drafts_the_same() -> None:
    """Its table grows, and shrinks again."""
    rng, pair = random.Random(0), Pair.of(6, max_texts=30)
    for _ in range(120):
        tokens = [part for _ in range(40) for part in (7, rng.randrange(2000), rng.randrange(3))]
        read(pair.python, pair.python.begin(), tokens)
        read(pair.native, pair.native.begin(), tokens)
        for floor in (0.0, 0.001):
            limits = Limits(12, 8.0, floor, branching=True)
            context = [*tokens[-5:], 7]
            assert drafts_of([pair.native], None, [context], limits) == [pair.python.speculate(context, limits)]
    for _ in range(30):
        pair.python.begin()
        pair.native.begin()
        assert pair.native.count([7]) == pair.python.count([7])
    assert pair.native.count([]) == 0


@pytest.mark.parametrize("branching", [False, True])
def test_of_its_own_tree_and_that_of_all_the_better_one_drafts_and_its_own_if_they_are_even(branching: bool) -> None:
    rng, won = random.Random(1), [0, 0, 0]
    for _ in range(150):
        depth, limits = rng.randint(2, 8), Limits(rng.randint(1, 8), rng.choice([1.0, 2.0]), 0.1, branching)
        texts = [[rng.randrange(3) for _ in range(rng.randint(1, 25))] for _ in range(rng.randint(1, 5))]
        own, others = [Pair.of(depth) for _ in texts], Pair.of(depth)
        for pair, text in zip(own, texts):
            for each in (pair, others):
                read(each.python, each.python.begin(), text)
                read(each.native, each.native.begin(), text)
        expected = []
        for pair, text in zip(own, texts):
            mine, theirs = pair.python.speculate(text, limits), others.python.speculate(text, limits)
            expected.append(mine if mine.score >= theirs.score else theirs)
            won[(theirs.score > mine.score) - (theirs.score < mine.score)] += 1
        assert drafts_of([pair.native for pair in own], others.native, texts, limits) == expected
    assert min(won) > 20


# Memory


def test_a_tree_without_texts_takes_nothing() -> None:
    rng = random.Random(2)
    tree = NativeTree(24, max_texts=5)
    for _ in range(40):
        text = tree.begin()
        read(tree, text, [rng.randrange(50) for _ in range(200)])
        tree.end(text)
    assert tree.num_bytes > 5 * 200 * 16
    for _ in range(5):
        tree.begin()
    assert tree.count([]) == 0 and tree.num_bytes < 1000


@pytest.mark.parametrize(("depth", "alphabet"), [(3, 2), (4, 3), (24, 50), (6, 2000)])
def test_what_ends_and_what_is_removed_gives_its_memory_back(depth: int, alphabet: int) -> None:
    rng, tree, texts = random.Random(2), NativeTree(depth, max_texts=5), list[list[int]]()
    for _ in range(60):
        text = tree.begin()
        texts.append([rng.randrange(alphabet) for _ in range(rng.randint(1, 200))])
        read(tree, text, texts[-1])
        before = tree.num_bytes
        tree.end(text)
        assert tree.num_bytes < before
    fresh = NativeTree(depth)
    for tokens in texts[-5:]:
        text = fresh.begin()
        read(fresh, text, tokens)
        fresh.end(text)
    assert tree.num_bytes <= 1.5 * fresh.num_bytes
    for _ in range(5):
        tree.begin()
    assert tree.count([]) == 0 and tree.num_bytes < 1000


def test_tables_shrink_and_paths_that_one_text_is_left_on_are_folded() -> None:
    wide = NativeTree(2, max_texts=2)
    read(wide, wide.begin(), [token for child in range(2000) for token in (7, child)])
    read(wide, wide.begin(), [7, 1, 7, 2, 7, 3])
    read(wide, wide.begin(), [1])
    assert wide.count([7]) == 3 and wide.num_bytes < 2000, "a table of two thousand takes a hundred thousand"
    tokens = list(range(200))
    twice, once = NativeTree(24, max_texts=2), NativeTree(24)
    read(once, once.begin(), tokens)
    for _ in range(2):
        read(twice, twice.begin(), tokens)
    read(twice, twice.begin(), [1])
    assert twice.count(tokens[:24]) == 1 and twice.num_bytes < 6 * once.num_bytes, (
        "spelled out it takes 23 times as many"
    )


def test_a_text_that_has_ended_or_never_begun_takes_no_tokens() -> None:
    tree = NativeTree(4, max_texts=2)
    text = tree.begin()
    read(tree, text, [1, 2])
    tree.end(text)
    for number in (text, text + 1, 10**9, -1):
        read(tree, number, [1, 2, 3])  # type: ignore[arg-type]
        tree.end(number)
    assert tree.count([]) == 2 and tree.count([1, 2]) == 1 and not tree.count([3])
    for _ in range(3):
        tree.begin()
    assert not tree.count([])


def test_bytes_stay_within_their_limit_and_the_newest_text_is_known() -> None:
    rng, limit = random.Random(3), 60_000
    tree = NativeTree(8, max_bytes=limit)
    for _ in range(60):
        tokens, text = [rng.randrange(300) for _ in range(150)], tree.begin()
        for start in range(0, 150, 10):
            read(tree, text, tokens[start : start + 10])
            assert tree.num_bytes <= limit
        tree.end(text)
        assert tree.count(tokens[-8:]) >= 1
    assert tree.num_bytes > limit // 4


def test_a_text_too_large_for_the_tree_is_left_out_and_the_next_one_is_kept() -> None:
    tree = NativeTree(8, max_bytes=5_000)
    large, small = tree.begin(), tree.begin()
    read(tree, large, list(range(1000)))
    read(tree, large, [1, 2, 3])
    read(tree, small, [7, 8, 7, 9])
    assert tree.count([7]) == 2 and tree.count([1]) == 0 and tree.num_bytes <= 5_000


def test_what_the_library_has_no_memory_for_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, found = NativeTree(8), native.suffix_library()
    text = tree.begin()
    for name in ("begin", "extend", "count", "speculate"):
        monkeypatch.setattr(found, f"paceline_suffix_{name}", lambda *_: -1)
    asked: list[Callable[[], object]] = [
        tree.begin,
        lambda: read(tree, text, [1, 2]),
        lambda: tree.count([1]),
        lambda: drafts_of([tree], None, [[1, 2]], Limits(4)),
    ]
    for ask in asked:
        with pytest.raises(MemoryError, match="no memory for a suffix tree"):
            ask()
    with monkeypatch.context() as changed, pytest.raises(MemoryError):
        changed.setattr(found, "paceline_suffix_new", lambda *_: None)
        NativeTree(8)


def test_a_tree_goes_with_its_object_and_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    found = native.suffix_library()
    monkeypatch.setattr(found, "paceline_suffix_free", _noting(freed, found.paceline_suffix_free))
    tree = NativeTree(8)
    address = tree.address
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(tree)
    assert not freed
    del tree
    gc.collect()
    assert freed == [address]


def _noting(freed: list[int], free: Callable[[int], None]) -> Callable[[int], None]:
    def noted(address: int) -> None:
        freed.append(address)
        free(address)

    return noted


# The drafter


class FakeContext:
    """What `propose` needs to see of the engine."""

    def __init__(self, table: Slots, slots: list[int], budgets: list[int]) -> None:
        self.table, self.slot_list, self.budget_list = table, slots, budgets


def made(kind: suffix.Kind, config: Suffix, monkeypatch: pytest.MonkeyPatch) -> SuffixDrafter:
    """With as much read in a round, whatever the kind."""
    monkeypatch.setattr(suffix, "kind_of_trees", lambda: kind._replace(read=30, read_each=2))
    return config.create()


@pytest.mark.parametrize("branching", [False, True])
def test_a_drafter_proposes_the_same_with_both_kinds_of_tree(branching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences come, grow, are preempted and go, some before they were read."""
    nodes = 0
    for seed in range(15):
        rng = random.Random(f"{branching} {seed}")
        config = Suffix(8, rng.randint(2, 9), 2.0, 0.1, rng.choice([0, 2, 5, 100]), tree=branching)
        drafters = [made(kind, config, monkeypatch) for kind in (suffix.PYTHON, suffix.NATIVE)]
        table, running = Slots(6, 400, 1, CPU), set[int]()
        for _ in range(40):
            for slot in range(6):
                if slot in running and rng.random() < 0.1:
                    running.remove(slot)
                    for drafter in drafters:
                        drafter.forget([slot])
                elif slot not in running and rng.random() < 0.4:
                    running.add(slot)
                    tokens = [rng.randrange(4) for _ in range(rng.randint(1, 60))]
                    table.begin(slot, tokens, rng.randint(1, len(tokens)))
            slots = rng.sample(sorted(running), rng.randint(0, len(running)))
            for slot in slots:
                table.append([slot], [[rng.randrange(4) for _ in range(rng.randint(1, 3))]])
            for drafter in drafters:
                drafter.observe(Observation(table, None, None, slots))  # type: ignore[arg-type]
            if rng.random() < 0.3:
                continue
            context = FakeContext(table, slots, [rng.randint(0, 9) for _ in slots])
            one, other = (drafter.propose(context) for drafter in drafters)  # type: ignore[arg-type]
            for name in ("tokens", "parents", "sizes"):
                assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
                assert getattr(one, name).shape == getattr(other, name).shape, name
            assert (one.chain, one.max_depth, one.names) == (other.chain, other.max_depth, other.names)
            nodes += sum(one.size_list)
        if rng.random() < 0.5:
            for drafter in drafters:
                drafter.reset()
    assert nodes > 500


def test_another_drafters_part_is_made_afresh() -> None:
    @dataclass
    class Both(QuietDrafter):
        inner: SuffixDrafter
        name = "both"
        max_nodes = 4

        def propose(self, context: Context) -> Proposal:
            return self.inner.propose(context)

    held = Both(Suffix().create())
    made = held.create()
    assert made.inner is not held.inner and made.inner._config == held.inner._config
    assert made.inner._responses is not held.inner._responses


def test_without_the_library_the_trees_are_those_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suffix.kind_of_trees() is suffix.NATIVE
    for lost in (None, object()):  # there is none; there is one from before it had trees
        with monkeypatch.context() as changed:
            changed.setattr(native, "library", lambda lost=lost: lost)
            changed.setattr(native, "suffix_library", native.suffix_library.__wrapped__)
            assert suffix.kind_of_trees() is suffix.PYTHON


def test_a_library_that_lays_out_its_questions_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "AskedStruct", native.c_int64)
    assert native.suffix_library.__wrapped__() is None
