"""The suffix tree against counting by scanning."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest

from paceline.drafters.suffix_node import LEAF_BYTES, NODE_BYTES, TEXT_BYTES, TOKEN_BYTES, Leaf, Node, table_bytes
from paceline.drafters.suffix_tree import Limits, SuffixTree
from paceline.drafters.tree import check_parents
from tests.drafters.runs import Path, count_runs, speculate


def runs_of(tree: SuffixTree) -> Counter[Path]:
    """The same, read off the tree's own nodes."""
    runs: Counter[Path] = Counter()

    def visit(node: Node, path: Path) -> None:
        for token, child in node.children():
            here = (*path, token)
            if isinstance(child, Leaf):
                text = child.text.tokens
                assert tuple(text[child.start : child.start + len(here)]) == here
                for stop in range(child.start + len(here), min(child.start + tree.max_depth, len(text)) + 1):
                    runs[tuple(text[child.start : stop])] += 1
            else:
                assert len(here) <= tree.max_depth
                runs[here] = child.count
                visit(child, here)

    visit(tree.root, ())
    return runs


def random_text(rng: random.Random, longest: int = 40) -> list[int]:
    alphabet = rng.randint(1, 4)
    return [rng.randint(0, alphabet) for _ in range(rng.randint(1, longest))]


def build(texts: list[list[int]], max_depth: int) -> SuffixTree:
    tree = SuffixTree(max_depth)
    for text in texts:
        tree.extend(tree.begin(), text)
    return tree


def test_counts_of_one_text_are_right_after_every_token():
    rng = random.Random(0)
    for _ in range(60):
        depth, text = rng.randint(2, 8), random_text(rng)
        tree = SuffixTree(depth)
        grown = tree.begin()
        for end, token in enumerate(text, start=1):
            tree.extend(grown, [token])
            assert runs_of(tree) == count_runs([text[:end]], depth)
            assert tree.root.count == end


def test_counts_of_texts_that_grow_in_turns_are_right():
    rng = random.Random(1)
    for _ in range(100):
        depth = rng.randint(2, 8)
        texts = [random_text(rng, 25) for _ in range(rng.randint(2, 5))]
        tree = SuffixTree(depth)
        handles, grown = [tree.begin() for _ in texts], [0] * len(texts)
        while any(done < len(text) for done, text in zip(grown, texts)):
            which = rng.choice([i for i, text in enumerate(texts) if grown[i] < len(text)])
            step = texts[which][grown[which] : grown[which] + rng.randint(1, 4)]
            tree.extend(handles[which], step)
            grown[which] += len(step)
            if grown[which] == len(texts[which]) and rng.random() < 0.5:
                tree.end(handles[which])
            assert runs_of(tree) == count_runs([text[:done] for text, done in zip(texts, grown)], depth)


def test_eviction_leaves_the_counts_of_a_tree_built_afresh():
    rng = random.Random(2)
    for _ in range(100):
        depth, kept = rng.randint(2, 8), rng.randint(1, 4)
        tree = SuffixTree(depth, max_texts=kept)
        texts: list[list[int]] = []
        handles = []
        for _ in range(8):
            handles.append(tree.begin())
            texts.append([])
            for _ in range(rng.randint(1, 6)):  # grow any of them, the evicted included
                which = rng.randrange(len(texts))
                more = random_text(rng, 8)
                tree.extend(handles[which], more)
                if which >= len(texts) - kept:
                    texts[which] += more
            alive = texts[-kept:]
            assert runs_of(tree) == count_runs(alive, depth)
            assert tree.root.count == sum(map(len, alive))
            context = random_text(rng, 10)
            limits = Limits(6, 2.0, 0.0, branching=rng.random() < 0.5)
            draft = tree.speculate(context, limits)
            tokens, parents, score, _ = speculate(alive, context, depth, limits)
            assert (draft.tokens, draft.parents, draft.score) == (tokens, parents, score)


def test_evicting_everything_leaves_nothing():
    rng = random.Random(3)
    tree = SuffixTree(6, max_texts=1)
    for _ in range(50):
        tree.extend(tree.begin(), random_text(rng))
    tree.begin()
    assert list(tree.root.children()) == [] and tree.root.count == 0


def test_eviction_folds_paths_that_one_suffix_is_left_on():
    tree = SuffixTree(8, max_texts=2)
    for _ in range(2):
        text = tree.begin()
        tree.extend(text, range(50))
    spelled_out = [token for token, child in tree.root.children() if isinstance(child, Node)]
    assert spelled_out == list(range(50))
    tree.begin()
    spelled_out = [token for token, child in tree.root.children() if isinstance(child, Node)]
    assert spelled_out == list(range(43, 50)), "only the suffixes too short to be full, which may yet grow"
    tree.extend(text, [50, 51])
    assert runs_of(tree) == count_runs([list(range(52))], 8)


def test_a_long_text_of_its_own_costs_one_leaf_a_token():
    tree = build([list(range(1000))], 24)
    assert sum(1 for _ in tree.root.children()) == 1000
    assert not any(isinstance(child, Node) for _, child in tree.root.children())


def test_runs_longer_than_the_depth_are_not_counted():
    tree = build([[1, 2, 3, 4]], 3)
    assert tree.count([1, 2, 3]) == 1
    assert tree.count([1, 2, 3, 4]) == 0
    assert tree.count([2, 1]) == 0
    assert tree.count([]) == 4


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_random_drafts_agree_with_the_plain_statement(branching, inside):
    """`inside`: the context is itself one of the texts, as in a sequence's own tree."""
    rng, proposed, matches = random.Random(f"{branching}{inside}"), 0, Counter()
    for _ in range(1500):
        depth = rng.randint(2, 10)
        texts = [random_text(rng) for _ in range(rng.randint(1, 3))]
        context = texts[-1] if inside else random_text(rng)
        limits = Limits(rng.randint(1, 8), rng.choice([0.5, 1.0, 2.0]), rng.choice([0.0, 0.1, 0.4, 1.0]), branching)
        draft = build(texts, depth).speculate(context, limits)
        tokens, parents, score, match = speculate(texts, context, depth, limits)
        assert (draft.tokens, draft.parents, draft.score) == (tokens, parents, score)
        if tokens:
            assert draft.match == match
            proposed += 1
            matches[match] += 1
    assert proposed > 500 and len(matches) > 4


def test_a_tree_is_closed_under_ancestors_best_first_and_within_its_limit():
    rng, branched = random.Random(4), 0
    for _ in range(500):
        text = random_text(rng, 60)
        limits = Limits(rng.randint(1, 9), 3.0, 0.05, branching=True)
        draft = build([text], 8).speculate(text, limits)
        check_parents(draft.parents)
        assert len(draft.tokens) <= min(limits.max_tokens, int(3.0 * draft.match))
        pairs = list(zip(draft.parents, draft.tokens))
        assert len(set(pairs)) == len(pairs), "siblings differ"
        runs, paths = count_runs([text], 8), []
        probabilities = []
        for parent, token in pairs:
            above = tuple(text[len(text) - draft.match :]) if parent < 0 else paths[parent]
            paths.append((*above, token))
            before = 1.0 if parent < 0 else probabilities[parent]
            probabilities.append(before * runs[paths[-1]] / runs[above])
        assert all(a >= b - 1e-12 for a, b in pairwise(probabilities))
        assert all(probability >= 0.05 for probability in probabilities)
        branched += draft.parents != list(range(-1, len(draft.tokens) - 1))
    assert branched > 100


def test_of_equal_scores_the_longer_match_wins():
    # "3" and "2 3" both lead to 4 for certain; factor 1 and one token at most: the same score twice
    draft = build([[1, 2, 3, 4]], 8).speculate([2, 3], Limits(1))
    assert (draft.tokens, draft.match) == ([4], 1)  # a match is shorter than the context
    draft = build([[1, 2, 3, 4]], 8).speculate([9, 2, 3], Limits(1))
    assert (draft.tokens, draft.match) == ([4], 2)


def test_of_equal_counts_the_lowest_token_wins():
    for text in ([1, 5, 1, 3, 1, 4], [1, 3, 1, 5, 1, 4]):
        assert build([text], 8).speculate([0, 1], Limits(4)).tokens == [3]


def test_the_lowest_token_wins_among_those_an_eviction_leaves():
    tree = SuffixTree(8, max_texts=3)
    for last in (3, 4, 5):
        tree.extend(tree.begin(), [1, last])
    tree.begin()  # evicts 1 3
    assert tree.speculate([0, 1], Limits(4)).tokens == [4]


# Memory


def counted(tree: SuffixTree) -> int:
    """The bytes of everything in a tree, found by walking it."""
    total = sum(TEXT_BYTES + TOKEN_BYTES * len(text.tokens) for text in tree.texts)
    agenda: list[Node | Leaf] = [tree.root]
    while agenda:
        place = agenda.pop()
        if isinstance(place, Leaf):
            own = TEXT_BYTES + TOKEN_BYTES * len(place.text.tokens) if place.text.removed else 0
            total += LEAF_BYTES + own
            continue
        total += (NODE_BYTES if place is not tree.root else 0) + table_bytes(len(place.others or ()))
        agenda += [child for _, child in place.children()]
    return total


def test_a_table_is_as_large_as_the_formula_says():
    table: dict[int, int] = {}
    assert table_bytes(0) == 0
    for count in range(1, 100_000):
        table[count] = count
        assert table_bytes(count) == sys.getsizeof(table)


def test_bytes_are_those_of_what_is_there_after_every_step():
    rng = random.Random(5)
    for _ in range(60):
        depth, kept = rng.randint(2, 8), rng.randint(1, 4)
        tree = SuffixTree(depth, max_texts=kept)
        handles = []
        for _ in range(8):
            handles.append(tree.begin())
            for _ in range(rng.randint(1, 6)):
                tree.extend(rng.choice(handles), random_text(rng, 8))
                assert tree.num_bytes == counted(tree)
            if rng.random() < 0.5:
                tree.end(handles.pop())
            if not handles:
                break


def similar_texts(rng: random.Random, count: int) -> list[list[int]]:
    """Phrases of a large vocabulary, some said again and again, between tokens of no pattern."""
    phrases = [[rng.randrange(300, 50_000) for _ in range(rng.randint(5, 40))] for _ in range(30)]
    texts = []
    for _ in range(count):
        parts = [rng.choice(phrases) if rng.random() < 0.5 else rng.sample(range(300, 50_000), 20) for _ in range(20)]
        texts.append([token for part in parts for token in part])
    return texts


@pytest.mark.parametrize("kind", ["similar", "nothing alike", "all the same"])
def test_bytes_are_within_a_quarter_of_what_python_allocates(kind):
    rng = random.Random(6)
    if kind == "similar":
        texts = similar_texts(rng, 40)
    elif kind == "nothing alike":
        texts = [[rng.randrange(300, 50_000) for _ in range(400)] for _ in range(40)]
    else:
        texts = [list(range(1000, 1400))] * 40
    for evicting in (False, True):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tree = SuffixTree(24, max_texts=20 if evicting else None)
            for tokens in texts:
                text = tree.begin()
                tree.extend(text, (token + 0 for token in tokens))
                tree.end(text)
            allocated = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert 0.75 < tree.num_bytes / allocated < 1.25, (kind, evicting, tree.num_bytes, allocated)


def test_past_its_bytes_a_tree_drops_its_oldest_texts_and_counts_the_rest_right():
    rng = random.Random(7)
    for limit in (60_000, 120_000):
        tree, texts, dropped = SuffixTree(8, max_bytes=limit), [], 0
        for tokens in similar_texts(rng, 12):
            text = tree.begin()
            texts.append(tokens[:150])
            for start in range(0, 150, 10):
                tree.extend(text, tokens[start : start + 10][: 150 - start])
                assert tree.num_bytes <= limit
            tree.end(text)
            dropped = len(texts) - len(tree.texts)
            assert runs_of(tree) == count_runs(texts[dropped:], 8)
        assert dropped > 0 and len(tree.texts) > 1


def test_a_text_too_large_for_the_tree_is_left_out_and_the_next_one_is_kept():
    tree = SuffixTree(8, max_bytes=5_000)
    large, small = tree.begin(), tree.begin()
    tree.extend(large, range(1000))
    assert large.removed and tree.num_bytes <= 5_000
    tree.extend(large, [1, 2, 3])
    tree.extend(small, [7, 8, 7, 9])
    assert tree.count([7]) == 2 and tree.count([1]) == 0
