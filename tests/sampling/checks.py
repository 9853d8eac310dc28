"""What the sampling tests share: slots filled by hand, trees at random, the papers' rules stated, and chi-square.

It knows the package's data shapes and nothing of its arithmetic: the rules are stated from their papers, one sequence
at a time, as programs that flip coins.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.tree import PADDING, Proposal
from paceline.params import SamplingParams
from paceline.sampling.state import Rows, SamplerState, Words
from paceline.sampling.verify import Judged

CPU = torch.device("cpu")
V = 4  # the vocabulary that rules are enumerated over

Flip = Callable[[int, int, float], bool]  # node, depth, chance
Dist = list[float]
Outcome = tuple[list[int], Dist]  # accepted nodes, the distribution of the last token
Drawn = list[Dist] | None  # of each node; None: chosen


@dataclass
class Case:
    """One sequence: its committed tokens, what it asks for, and the tree drafted for it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    words: Words = field(default_factory=lambda: Words([], []))
    seed: int = 0
    sample: int = 0
    tokens: list[int] = field(default_factory=list)  # of the nodes
    parents: list[int] = field(default_factory=list)
    scratch: list[bool] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`; none for the root, -1."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def drafted(self, node: int) -> list[int]:
        return [self.tokens[step] for step in self.path(node)]

    def depth(self, node: int) -> int:
        return len(self.path(node))


def make_state(cases: list[Case], vocab_size: int, device: torch.device = CPU) -> SamplerState:
    """Case i sits in slot i."""
    table = Slots(len(cases), max(case.length for case in cases) + 32, 4, device)
    state = SamplerState(table, vocab_size, device)
    for slot, case in enumerate(cases):
        table.begin(slot, [*case.prompt, *case.output], len(case.prompt))
        state.set(slot, case.params, case.words, case.seed, case.sample)
    return state


def make_rows(cases: list[Case]) -> tuple[Rows, list[tuple[int, int]]]:
    """Every case's root and nodes, and for each row its (case, node)."""
    places = [(slot, node) for slot, case in enumerate(cases) for node in range(-1, len(case.tokens))]
    deepest = max(cases[slot].depth(node) for slot, node in places)
    path = torch.full((len(places), deepest), -1, dtype=torch.int64)
    for row, (slot, node) in enumerate(places):
        drafted = cases[slot].drafted(node)
        path[row, : len(drafted)] = torch.tensor(drafted, dtype=torch.int64)
    positions = [cases[slot].length - 1 + cases[slot].depth(node) for slot, node in places]
    slots = torch.tensor([slot for slot, _ in places])
    return Rows(slots, list(range(len(cases))), torch.tensor(positions), path), places


def one_row(rows: Rows, row: int) -> Rows:
    """A row by itself, its path cut to its own depth."""
    depth = int((rows.drafted[row] >= 0).sum())
    slot = int(rows.slots[row])
    return Rows(rows.slots[row : row + 1], [slot], rows.positions[row : row + 1], rows.drafted[row : row + 1, :depth])


def random_tree(draws: np.random.Generator, nodes: int, vocab_size: int) -> tuple[list[int], list[int]]:
    parents = [int(draws.integers(-1, node)) for node in range(nodes)]
    return draws.integers(0, vocab_size, nodes).tolist(), parents


def make_proposal(cases: list[Case], probs: list[Tensor] | None = None) -> Proposal:
    """Padded as the engine pads; probs[b] is [nodes, V]."""
    most = max(len(case.tokens) for case in cases)
    tokens = torch.zeros(len(cases), most, dtype=torch.int64)
    parents = torch.full((len(cases), most), PADDING, dtype=torch.int64)
    scratch = torch.zeros(len(cases), most, dtype=torch.bool)
    drawn = None if probs is None else torch.zeros(len(cases), most, probs[0].shape[1], dtype=torch.float64)
    for row, case in enumerate(cases):
        count = len(case.tokens)
        tokens[row, :count] = torch.tensor(case.tokens, dtype=torch.int64)
        parents[row, :count] = torch.tensor(case.parents, dtype=torch.int64)
        scratch[row, : len(case.scratch)] = torch.tensor(case.scratch, dtype=torch.bool)
        if drawn is not None and probs is not None:
            drawn[row, :count] = probs[row]
    chain = all(case.parents == list(range(-1, len(case.parents) - 1)) for case in cases)
    sizes = torch.tensor([len(case.tokens) for case in cases])
    hidden = scratch if any(any(case.scratch) for case in cases) else None
    return Proposal(tokens, parents, sizes, chain, drawn, hidden, names=("fake",))


def make_judged(cases: list[Case], logits: Tensor, probs: list[Tensor] | None = None) -> Judged:
    """Logits [R, V] in the order of make_rows; index as the engine lays it out: padding points at a real row."""
    rows, _ = make_rows(cases)
    proposal = make_proposal(cases, probs)
    most = proposal.num_nodes
    index, first = [], 0
    for case in cases:
        index.append([first + min(node, len(case.tokens)) for node in range(most + 1)])
        first += 1 + len(case.tokens)
    return Judged(proposal, logits, rows, torch.tensor(index), make_state(cases, logits.shape[1]))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int32), other.view(torch.int32))


def fits(counts: np.ndarray, expected: np.ndarray, alpha: float) -> tuple[bool, str]:
    """Chi-square of counts against expected ones; cells that expect fewer than 5 are thrown together."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    if counts[expected <= 0].sum():
        return False, f"{counts[expected <= 0].sum():g} outcomes that cannot happen"
    small = expected < 5
    seen = np.append(counts[~small], counts[small].sum())
    hoped = np.append(expected[~small], expected[small].sum())
    seen, hoped = (seen, hoped) if hoped[-1] >= 5 else (_fold(seen), _fold(hoped))
    statistic = float(((seen - hoped) ** 2 / hoped).sum())
    value = float(scipy.stats.chi2.sf(statistic, len(hoped) - 1))
    return value > alpha, f"chi-square {statistic:.1f} with {len(hoped) - 1} degrees of freedom, p = {value:.3g}"


def _fold(cells: np.ndarray) -> np.ndarray:
    """The last cell joins the one before it."""
    return np.append(cells[:-2], cells[-2:].sum())


def detectable_distance(samples: int, cells: int, alpha: float, power: float) -> float:
    """The total variation from which on a chi-square test of that many samples finds a deviation with that power.

    Noncentrality is N·Σ d²/p, at least N·(Σ|d|)² = 4·N·TV² by Cauchy and Schwarz, whatever the deviation d looks like.
    """
    freedom = cells - 1
    critical = scipy.stats.chi2.isf(alpha, freedom)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if scipy.stats.ncx2.sf(critical, freedom, middle) < power else (low, middle)
    return float(np.sqrt(high / (4 * samples)))


# The rules, stated


def normed(weights: Dist, otherwise: Dist) -> Dist:
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else otherwise


def point(token: int, size: int) -> Dist:
    return [float(other == token) for other in range(size)]


def stated_rejection(case: Case, p: list[Dist], q: Drawn, flip: Flip) -> Outcome:
    """p[0] at the root, p[1 + node] after a node. Children are tried in order, each refusal leaving the residual."""
    accepted: list[int] = []
    rest = p[0]
    for node, token in enumerate(case.tokens):
        if case.parents[node] != (accepted[-1] if accepted else -1) or (case.scratch and case.scratch[node]):
            continue
        drawn = point(token, len(rest)) if q is None else q[node]
        chance = min(1.0, rest[token] / drawn[token]) if drawn[token] > 0 else 0.0
        if flip(node, len(accepted) + 1, chance):
            accepted.append(node)
            rest = p[1 + node]
        else:
            rest = normed([max(a - b, 0.0) for a, b in zip(rest, drawn)], rest)
    return accepted, rest


def stated_block(case: Case, p: list[Dist], q: Drawn, flip: Flip) -> Outcome:
    """Chains, judged as a whole; chosen tokens by the closed form that needs no q."""
    count = len(case.tokens)
    whole = [1.0]
    for node, token in enumerate(case.tokens):
        drawn = 1.0 if q is None else q[node][token]
        whole.append(min(whole[-1] * p[node][token] / drawn, 1.0) if drawn > 0 else 0.0)

    def left(kept: int) -> Dist:
        if q is None:
            gone = case.tokens[kept]
            return [0.0 if token == gone else whole[kept] * share for token, share in enumerate(p[kept])]
        return [max(whole[kept] * a - b, 0.0) for a, b in zip(p[kept], q[kept])]

    best = 0
    for kept in range(1, count + 1):
        if kept == count:
            chance = whole[kept]
        else:
            mass = sum(left(kept))
            chance = mass / (mass + 1 - whole[kept]) if mass + 1 - whole[kept] > 0 else 1.0
        if flip(kept - 1, kept, chance):
            best = kept
    return list(range(best)), p[count] if best == count else normed(left(best), p[best])


STATED = {"rejection": stated_rejection, "block": stated_block}


# All outcomes of a program that picks


class Run:
    """One way through a program: a list of picks made before, then always the first that is possible."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.step, self.weight = script, 0, 1.0
        self.agenda: list[list[int]] = []

    def pick(self, chances: Dist) -> int:
        if self.step == len(self.script):
            first, *others = [choice for choice, chance in enumerate(chances) if chance > 0]
            self.agenda += [[*self.script, choice] for choice in others]
            self.script = [*self.script, first]
        choice = self.script[self.step]
        self.step += 1
        self.weight *= chances[choice]
        return choice


def outcomes(program: Callable[[Run], Any]) -> Iterator[tuple[float, Any]]:
    agenda: list[list[int]] = [[]]
    while agenda:
        run = Run(agenda.pop())
        result = program(run)
        agenda += run.agenda
        yield run.weight, result


class Models:
    """A random target and a random drafter: a distribution after every text of at most `depth` tokens."""

    def __init__(self, seed: int, depth: int) -> None:
        draws = np.random.default_rng(seed)
        texts = [text for length in range(depth + 1) for text in itertools.product(range(V), repeat=length)]
        self.p = {text: draws.dirichlet([0.7] * V).tolist() for text in texts}
        self.q = {text: draws.dirichlet([0.7] * V).tolist() for text in texts}
        self.favourites = {text: draws.permutation(V).tolist() for text in texts}

    def draft(self, run: Run, parents: list[int], how: str) -> tuple[Case, list[Dist], Drawn]:
        """Tokens for a tree of that shape: drawn, drawn without replacement, or chosen."""
        case, q = Case([0], parents=parents), []
        for node, parent in enumerate(parents):
            above = tuple(case.drafted(parent))
            before = [case.tokens[other] for other in range(node) if parents[other] == parent]
            chances = list(self.q[above])
            if how == "without replacement":
                chances = normed([0.0 if token in before else share for token, share in enumerate(chances)], chances)
            q.append(chances)
            case.tokens.append(self.favourites[above][len(before)] if how == "chosen" else run.pick(chances))
        p = [self.p[tuple(case.drafted(node))] for node in range(-1, len(parents))]
        return case, p, None if how == "chosen" else q

    def truth(self, depth: int) -> np.ndarray:
        texts = itertools.product(range(V), repeat=depth)
        return np.array([math.prod(self.p[text[:i]][text[i]] for i in range(depth)) for text in texts])

    def spoken(self, rule: str, parents: list[int], how: str, depth: int) -> tuple[np.ndarray, float]:
        """The exact distribution of the first `depth` tokens under a rule, and the mean number of accepted ones."""
        mass: dict[tuple[int, ...], float] = defaultdict(float)
        mean = 0.0

        def program(run: Run) -> tuple[Case, Outcome]:
            case, p, q = self.draft(run, parents, how)
            return case, STATED[rule](case, p, q, lambda node, depth, chance: run.pick([1 - chance, chance]) == 1)

        for weight, (case, (accepted, rest)) in outcomes(program):
            mean += weight * len(accepted)
            for token, share in enumerate(rest):
                mass[(*(case.tokens[node] for node in accepted), token)] += weight * share
        for length in range(1, depth):  # what a round leaves open, the target goes on to say
            for text in [text for text in mass if len(text) == length]:
                for token, share in enumerate(self.p[text]):
                    mass[(*text, token)] += mass[text] * share
        return np.array([mass[text] for text in itertools.product(range(V), repeat=depth)]), mean
