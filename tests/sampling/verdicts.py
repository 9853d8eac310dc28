"""Random rounds, and `verify` held against the rules as they are stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.params import SamplingParams
from paceline.sampling import rules
from paceline.sampling.noise import ACCEPT, RESIDUAL, SAMPLE
from paceline.sampling.rules import RULES
from paceline.sampling.verify import Judged, Verdict, verify
from tests.sampling.checks import STATED, Case, Dist, V, make_judged, normed, random_tree
from tests.sampling.noises import stated_uniform


def softmax(logits: list[float]) -> Dist:
    weights = [math.exp(value - max(logits)) for value in logits]
    return normed(weights, weights)


def random_batch(seed: int, chain: bool, drawn: bool) -> tuple[list[Case], Tensor, list[Tensor] | None]:
    """Sequences of different sizes (some 0), seeds and lengths; a few impossible tokens on either side."""
    draws = np.random.default_rng(seed)
    cases = []
    for number in range(24):
        tokens, parents = random_tree(draws, int(draws.integers(0, 7)), V)
        parents = list(range(-1, len(tokens) - 1)) if chain else parents
        prompt, output = [0] * int(draws.integers(1, 9)), [1] * int(draws.integers(0, 9))
        own_seed = int(draws.integers(-(2**63), 2**63 - 1)) + 2**62
        case = Case(prompt, output, SamplingParams(), seed=own_seed, sample=number % 3, tokens=tokens, parents=parents)
        cases.append(case)
    logits = torch.from_numpy(draws.normal(0, 1.5, (sum(1 + len(case.tokens) for case in cases), V))).float()
    logits[torch.from_numpy(draws.random(logits.shape) < 0.08)] = -math.inf
    logits[:, 0] = logits[:, 0].clamp(min=-3)  # something stays possible
    if not drawn:
        return cases, logits, None
    probs = [torch.from_numpy(draws.dirichlet([0.6] * V, len(case.tokens)).reshape(-1, V)) for case in cases]
    for own in probs:
        own[torch.from_numpy(draws.random(len(own)) < 0.1), 1] = 0.0
        own /= own.sum(1, keepdim=True)
    return cases, logits, probs


def per_case(cases: list[Case], logits: Tensor) -> list[list[list[float]]]:
    """Each case's rows of logits: the root's, then its nodes'."""
    rows, result = logits.tolist(), []
    for case in cases:
        result.append(rows[: 1 + len(case.tokens)])
        rows = rows[1 + len(case.tokens) :]
    return result


def noisiest(scores: list[float], case: Case, position: int, stream: int, extra: int | None) -> int:
    """Gumbel-max with the noise of that key."""

    def score(token: int) -> float:
        return scores[token] - math.log(
            -math.log(stated_uniform(case.seed, case.sample, position, stream, extra, token))
        )

    return max(range(len(scores)), key=score)


def assert_verdict(verdict: Verdict, row: int, case: Case, accepted: list[int], final: int) -> None:
    width = verdict.nodes.shape[1]
    tokens = [*(case.tokens[node] for node in accepted), final]
    assert int(verdict.lengths[row]) == len(accepted), (row, case)
    assert verdict.nodes[row].tolist() == accepted + [-1] * (width - len(accepted)), (row, case)
    assert verdict.tokens[row].tolist() == tokens + [-1] * (width + 1 - len(tokens)), (row, case)


def check_same_coins(acceptance: str, seed: int, chain: bool, drawn: bool) -> list[int]:
    """verify() decides as the statement does with coins and noise of the same keys. Returns accepted lengths."""
    cases, logits, probs = random_batch(seed, chain, drawn)
    verdict = verify(make_judged(cases, logits, probs), RULES[acceptance])
    lengths = []
    for row, (case, own) in enumerate(zip(cases, per_case(cases, logits))):
        root = case.length - 1

        def flip(node: int, depth: int, chance: float, case: Case = case, root: int = root) -> bool:
            key = (case.seed, case.sample, root + depth, ACCEPT, (root + 1) * 4096 + node)
            return stated_uniform(*key) < chance

        q = None if probs is None else probs[row].tolist()
        accepted, rest = STATED[acceptance](case, [softmax(values) for values in own], q, flip)
        scores = [math.log(share) if share > 0 else -math.inf for share in rest]
        final = noisiest(scores, case, root + 1 + len(accepted), RESIDUAL, root + 1)
        assert_verdict(verdict, row, case, accepted, final)
        lengths.append(len(accepted))
    return lengths


def check_thresholds(acceptance: str, seed: int, chain: bool, drawn: bool) -> None:
    """A coin 1e-10 under the stated chance is accepted, one 1e-10 above is not; the last token's distribution is
    the stated one to 1e-12."""
    cases, logits, probs = random_batch(seed, chain, drawn)
    judged = make_judged(cases, logits, probs)
    draws = np.random.default_rng(seed)
    coins = torch.full(judged.proposal.tokens.shape, 0.5, dtype=torch.float64)
    expected = []
    for row, (case, own) in enumerate(zip(cases, per_case(cases, logits))):

        def flip(node: int, depth: int, chance: float, row: int = row) -> bool:
            yes = bool(draws.random() < 0.6)
            yes = (yes and chance > 1e-9) or chance > 1 - 1e-9
            coins[row, node] = chance - 1e-10 if yes else chance + 1e-10
            return yes

        q = None if probs is None else probs[row].tolist()
        expected.append(STATED[acceptance](case, [softmax(values) for values in own], q, flip))
    seen: list[Tensor] = []

    def sample(judged: Judged, probabilities: Tensor, positions: Tensor) -> Tensor:
        seen.append(probabilities)
        return torch.zeros_like(positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_coin", lambda judged, node, depth: coins[:, node])
        patch.setattr(rules, "_sample", sample)
        verdict = verify(judged, RULES[acceptance])
    for row, (accepted, rest) in enumerate(expected):
        assert_verdict(verdict, row, cases[row], accepted, 0)
        assert max(abs(a - b) for a, b in zip(seen[0][row].tolist(), rest)) <= 1e-12


def walk(case: Case, choices: list[int]) -> list[int]:
    """From the root, go to the first child that is the target's choice, as long as there is one."""
    accepted: list[int] = []
    while True:
        here = accepted[-1] if accepted else -1
        allowed = [
            n for n, parent in enumerate(case.parents) if parent == here and not (case.scratch and case.scratch[n])
        ]
        hits = [node for node in allowed if case.tokens[node] == choices[1 + here]]
        if not hits:
            return accepted
        accepted.append(hits[0])


def check_walk(seed: int, scratch: bool = False) -> list[int]:
    """`exact` against the walk above, with the target's choices made from the stated noise."""
    cases, logits, _ = random_batch(seed, chain=False, drawn=False)
    draws = np.random.default_rng(seed)
    for case in cases if scratch else []:
        case.scratch = [bool(flag) for flag in draws.random(len(case.tokens)) < 0.4]
    verdict = verify(make_judged(cases, logits), RULES["exact"])
    lengths = []
    for row, (case, own) in enumerate(zip(cases, per_case(cases, logits))):
        root = case.length - 1
        choices = [
            noisiest(values, case, root + case.depth(node) + 1, SAMPLE, None)
            for node, values in enumerate(own, start=-1)
        ]
        accepted = walk(case, choices)
        assert_verdict(verdict, row, case, accepted, choices[1 + (accepted[-1] if accepted else -1)])
        lengths.append(len(accepted))
    return lengths
