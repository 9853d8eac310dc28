"""What a suffix tree should say, stated plainly: runs counted afresh, and drafts by walking the counts."""

from __future__ import annotations

from collections import Counter

from paceline.drafters.suffix_tree import Limits

Path = tuple[int, ...]


def count_runs(texts: list[list[int]], max_depth: int) -> Counter[Path]:
    """How often each run of at most max_depth tokens occurs."""
    runs: Counter[Path] = Counter()
    for text in texts:
        for start in range(len(text)):
            for stop in range(start + 1, min(start + max_depth, len(text)) + 1):
                runs[tuple(text[start:stop])] += 1
    return runs


def followers(runs: Counter[Path], path: Path, max_depth: int) -> list[tuple[int, int]]:
    """(count, token) of what follows, the most frequent first, ties to the lowest token."""
    if len(path) >= max_depth:
        return []
    found = [(runs[(*path, token)], token) for token in range(8) if runs[(*path, token)]]
    return sorted(found, key=lambda item: (-item[0], item[1]))


def follow(runs: Counter[Path], path: Path, max_depth: int, budget: int, floor: float):
    tokens, parents, score, probability = [], [], 0.0, 1.0
    while len(tokens) < budget:
        options = followers(runs, path, max_depth)
        if not options:
            break
        probability *= options[0][0] / runs[path]
        if probability < floor:
            break
        path = (*path, options[0][1])
        parents.append(len(tokens) - 1)
        tokens.append(options[0][1])
        score += probability
    return tokens, parents, score


def grow(runs: Counter[Path], path: Path, max_depth: int, budget: int, floor: float):
    tokens, parents, score = [], [], 0.0
    frontier: list[tuple[float, Path, int]] = []  # probability, path, parent: in the order they were met
    probability, parent = 1.0, -1
    while len(tokens) < budget:
        for count, token in followers(runs, path, max_depth):
            if probability * (count / runs[path]) >= floor:
                frontier.append((probability * (count / runs[path]), (*path, token), parent))
        if not frontier:
            break
        chosen = max(range(len(frontier)), key=lambda i: (frontier[i][0], -i))
        probability, path, above = frontier.pop(chosen)
        parent = len(tokens)
        tokens.append(path[-1])
        parents.append(above)
        score += probability
    return tokens, parents, score


def speculate(texts: list[list[int]], context: list[int], max_depth: int, limits: Limits):
    """Suffix decoding said plainly: tokens, parents, score, match."""
    runs = count_runs(texts, max_depth)
    tail = tuple(context[-max_depth:])
    best: tuple[list[int], list[int], float, int] = ([], [], 0.0, 0)
    for match in range(1, len(tail)):
        if not runs[tail[-match:]]:
            break
        budget = min(limits.max_tokens, int(limits.factor * match))
        expand = grow if limits.branching else follow
        tokens, parents, score = expand(runs, tail[-match:], max_depth, budget, limits.min_probability)
        if tokens and score >= best[2]:
            best = tokens, parents, score, match
    return best
