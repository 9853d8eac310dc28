"""The acceptance rules. Each is stated once, as a program that flips coins, and that statement is used twice:

run on every outcome of its coins and drafts, with their probabilities, it must give the target's distribution;
run on the very coins `verify` uses, it must give the verdict that `verify` gives.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.params import SamplingParams
from paceline.sampling import verify as rules
from paceline.sampling.noise import ACCEPT, RESIDUAL, SAMPLE
from paceline.sampling.verify import ACCEPTANCE, Judged, Verdict, argmax, check_acceptance, follow, verify
from tests.sampling.checks import STATED, Case, Dist, Models, V, make_judged, normed, random_tree
from tests.sampling.test_noise import stated_uniform

# The statements against the truth


CHAINS = [[-1], [-1, 0], [-1, 0, 1]]
TREES = [[-1, -1], [-1, -1, -1], [-1, -1, -1, -1], [-1, -1, 0, 0], [-1, 0, -1, 2, 1]]


def grown(models: Models, rule: str, parents: list[int], how: str) -> tuple[np.ndarray, np.ndarray]:
    """The distribution a rule gives over texts one token longer than the tree is deep, and the target's own."""
    shape = Case([0], tokens=[0] * len(parents), parents=parents)
    depth = 1 + max(shape.depth(node) for node in range(len(parents)))
    return models.spoken(rule, parents, how, depth)[0], models.truth(depth)


@pytest.mark.parametrize("how", ["drawn", "chosen", "without replacement"])
@pytest.mark.parametrize("parents", CHAINS + TREES, ids=str)
def test_rejection_as_stated_reproduces_the_targets_distribution(parents: list[int], how: str) -> None:
    for seed in range(3):
        found, truth = grown(Models(seed, 4), "rejection", parents, how)
        assert np.abs(found - truth).max() <= 1e-12


@pytest.mark.parametrize("how", ["drawn", "chosen"])
@pytest.mark.parametrize("parents", CHAINS, ids=str)
def test_block_as_stated_reproduces_the_targets_distribution(parents: list[int], how: str) -> None:
    for seed in range(3):
        found, truth = grown(Models(seed, 4), "block", parents, how)
        assert np.abs(found - truth).max() <= 1e-12


@pytest.mark.parametrize("how", ["drawn", "chosen"])
def test_block_accepts_at_least_as_much_as_rejection_and_the_same_for_one_token(how: str) -> None:
    for seed in range(5):
        models = Models(seed, 4)
        gains = [
            models.spoken("block", chain, how, 1 + len(chain))[1]
            - models.spoken("rejection", chain, how, 1 + len(chain))[1]
            for chain in CHAINS
        ]
        assert abs(gains[0]) < 1e-12 and min(gains) > -1e-12
        assert how == "chosen" or max(gains) > 1e-6


# verify() against the statements


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
    verdict = verify(make_judged(cases, logits, probs), acceptance)
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


MODES = [("rejection", True), ("rejection", False), ("block", True)]


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("acceptance, chain", MODES)
def test_verify_decides_as_stated_on_the_same_coins(acceptance: str, chain: bool, drawn: bool) -> None:
    lengths = [length for seed in range(12) for length in check_same_coins(acceptance, seed, chain, drawn)]
    assert {0, 1, 2} <= set(lengths)


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
        verdict = verify(judged, acceptance)
    for row, (accepted, rest) in enumerate(expected):
        assert_verdict(verdict, row, cases[row], accepted, 0)
        assert max(abs(a - b) for a, b in zip(seen[0][row].tolist(), rest)) <= 1e-12


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("acceptance, chain", MODES)
def test_verifys_chances_and_residuals_are_the_stated_ones(acceptance: str, chain: bool, drawn: bool) -> None:
    for seed in range(12):
        check_thresholds(acceptance, seed, chain, drawn)


# exact, greedy and typical


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
    verdict = verify(make_judged(cases, logits), "exact")
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


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_the_host_s_verdict_on_greedy_requests_is_verify_s(acceptance: str, scratch: bool, chain: bool) -> None:
    lengths: set[int] = set()
    for seed in range(12):
        cases, logits, _ = random_batch(seed, chain, drawn=False)
        draws = np.random.default_rng(seed)
        for case in cases:
            case.params = SamplingParams(temperature=0.0)
            case.scratch = [bool(flag) for flag in draws.random(len(case.tokens)) < 0.3] if scratch else []
        logits[3] = -math.inf  # nothing can be sampled there
        judged = make_judged(cases, logits)
        sizes = [len(case.tokens) for case in cases]
        followed = follow(judged.proposal, sizes, argmax(logits).tolist()).read()
        assert followed == verify(judged, acceptance).read()
        lengths |= {len(decision.nodes) for decision in followed}
    assert {0, 1, 2} <= lengths


@pytest.mark.parametrize("scratch", [False, True])
def test_exact_walks_the_targets_own_choices(scratch: bool) -> None:
    lengths = [length for seed in range(12) for length in check_walk(seed, scratch)]
    assert {0, 1, 2} <= set(lengths)


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_scratch_nodes_are_never_accepted(acceptance: str) -> None:
    """Every node carries the only possible token, and would be accepted for certain if it might."""
    logits = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]] * 4)
    case = Case([0], tokens=[0, 0, 0], parents=[-1, 0, 1], scratch=[False, True, False])
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        case.params = params
        assert_verdict(verify(make_judged([case], logits), acceptance), 0, case, [0], 0)


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block", "typical"])
@pytest.mark.parametrize("beside_sampled", [True, False])
def test_greedy_requests_take_the_likeliest_token_under_every_rule(acceptance: str, beside_sampled: bool) -> None:
    """Logits are whole numbers, so many tie: the lowest id wins, whatever q says and whoever else is in the batch."""
    for seed in range(8):
        cases, logits, probs = random_batch(seed, acceptance == "block", acceptance in ("rejection", "block"))
        logits = logits.round()
        for number, case in enumerate(cases):
            if number % 2 == 0 or not beside_sampled:
                case.params = SamplingParams(temperature=0.0)
        verdict = verify(make_judged(cases, logits, probs), acceptance)
        for row, (case, own) in enumerate(zip(cases, per_case(cases, logits))):
            if case.params.greedy:
                choices = [values.index(max(values)) for values in own]
                accepted = walk(case, choices)
                assert_verdict(verdict, row, case, accepted, choices[1 + (accepted[-1] if accepted else -1)])


def stated_typical(case: Case, p: list[Dist]) -> list[int]:
    """All paths of likely enough nodes; the longest, then the likeliest."""

    def fine(node: int) -> bool:
        above = p[1 + case.parents[node]]
        entropy = -sum(share * math.log(share + 1e-5) for share in above)
        return above[case.tokens[node]] > min(0.09, 0.3 * math.exp(-entropy))

    paths = [case.path(node) for node in range(-1, len(case.tokens))]
    paths = [path for path in paths if all(map(fine, path))]

    def merit(path: list[int]) -> tuple[int, float]:
        return len(path), sum(math.log(p[1 + case.parents[node]][case.tokens[node]]) for node in path)

    return max(paths, key=merit)


def test_typical_accepts_the_longest_path_of_likely_enough_tokens() -> None:
    seen = set()
    for seed in range(20):
        cases, logits, _ = random_batch(seed, chain=False, drawn=False)
        logits = logits * 2
        verdict = verify(make_judged(cases, logits), "typical")
        for row, (case, own) in enumerate(zip(cases, per_case(cases, logits))):
            accepted = stated_typical(case, [softmax(values) for values in own])
            end = accepted[-1] if accepted else -1
            final = noisiest(own[1 + end], case, case.length + len(accepted), SAMPLE, None)
            assert_verdict(verdict, row, case, accepted, final)
            seen.add((len(accepted), len(case.tokens)))
    assert {length for length, _ in seen} >= {0, 1, 2, 3}
    assert any(length < size for length, size in seen)


# Edges

BROKEN = [(name, temperature) for name in ACCEPTANCE for temperature in (0.0, 1.0)]


@pytest.mark.parametrize("broken", [-math.inf, math.nan], ids=["ruled out", "NaN"])
@pytest.mark.parametrize("acceptance, temperature", BROKEN)
def test_a_row_nothing_can_be_sampled_from_gives_minus_one(acceptance: str, broken: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    cases = [Case([0], params=params, tokens=[2, 1], parents=[-1, 0]), Case([0, 1], tokens=[0], parents=[-1])]
    cases.append(Case([0], params=params))
    logits = torch.zeros(6, V)
    logits[0], logits[5] = broken, broken
    logits[3:5] = torch.tensor([0.0, -math.inf, -math.inf, -math.inf])
    verdict = verify(make_judged(cases, logits), acceptance)
    assert_verdict(verdict, 0, cases[0], [], -1)
    assert_verdict(verdict, 1, cases[1], [0], 0)
    assert_verdict(verdict, 2, cases[2], [], -1)


def test_one_nan_among_numbers_is_enough_for_minus_one() -> None:
    logits = torch.tensor([[1.0, math.nan, 0.0, 5.0]])
    for acceptance in ("exact", "rejection", "block", "typical"):
        assert verify(make_judged([Case([0])], logits), acceptance).tokens.tolist() == [[-1]]


def test_argmax_takes_the_lowest_of_equal_ids() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [0.0, -0.0, 0.0], [-math.inf] * 3, [math.nan, 1, 2], [-math.inf, -5, -5]])
    assert argmax(values).tolist() == [1, 0, -1, -1, 1]


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block", "typical"])
def test_padding_is_never_accepted_even_if_its_token_is_the_only_one(acceptance: str) -> None:
    """Padding has token 0, and 0 is all the target can say; a proposal cut by its budget keeps its tokens."""
    logits = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]]).expand(8, V).clone()
    cases = [Case([0], tokens=[0, 0, 0], parents=[-1, 0, 1]), Case([0]), Case([0], tokens=[0, 0], parents=[-1, 0])]
    verdict = verify(make_judged(cases, logits), acceptance)
    assert verdict.lengths.tolist() == [3, 0, 2]
    judged = make_judged(cases, logits)
    judged.proposal = judged.proposal.limited(torch.tensor([1, 3, 0]))
    assert verify(judged, acceptance).lengths.tolist() == [1, 0, 0]


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block", "typical"])
def test_without_any_nodes_each_sequence_gets_one_token(acceptance: str) -> None:
    judged = make_judged([Case([0]), Case([1, 2])], torch.zeros(2, V))
    judged.proposal = Proposal.empty(2, torch.device("cpu"))
    verdict = verify(judged, acceptance)
    assert verdict.nodes.shape == (2, 0) and verdict.lengths.tolist() == [0, 0]
    assert all(0 <= token < V for token in verdict.tokens[:, 0].tolist())


def test_an_unknown_rule_is_refused_in_a_sentence() -> None:
    with pytest.raises(OptionError, match="acceptance='exakt' is not known; allowed: exact, rejection, block, typical"):
        check_acceptance("exakt")
