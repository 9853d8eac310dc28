"""The acceptance rules. Each is stated once, as a program that flips coins, and that statement is used twice:

run on every outcome of its coins and drafts, with their probabilities, it must give the target's distribution;
run on the very coins `verify` uses, it must give the verdict that `verify` gives.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.drafters.tree import PADDING, Proposal
from paceline.errors import OptionError
from paceline.params import SamplingParams
from paceline.sampling.noise import SAMPLE
from paceline.sampling.rules import RULES, find_rule
from paceline.sampling.verify import Judged, Verdict, argmax, follow, path_of, verify
from tests.sampling.checks import Case, Dist, Models, V, make_judged
from tests.sampling.verdicts import (
    assert_verdict,
    check_same_coins,
    check_thresholds,
    check_walk,
    noisiest,
    per_case,
    random_batch,
    softmax,
    walk,
)

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


MODES = [("rejection", True), ("rejection", False), ("block", True)]


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("acceptance, chain", MODES)
def test_verify_decides_as_stated_on_the_same_coins(acceptance: str, chain: bool, drawn: bool) -> None:
    lengths = [length for seed in range(12) for length in check_same_coins(acceptance, seed, chain, drawn)]
    assert {0, 1, 2} <= set(lengths)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("acceptance, chain", MODES)
def test_verifys_chances_and_residuals_are_the_stated_ones(acceptance: str, chain: bool, drawn: bool) -> None:
    for seed in range(12):
        check_thresholds(acceptance, seed, chain, drawn)


# exact, greedy and typical


@pytest.mark.parametrize("acceptance", RULES)
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
        assert followed == verify(judged, RULES[acceptance]).read()
        lengths |= set(map(len, followed.nodes))
    assert {0, 1, 2} <= lengths


@pytest.mark.parametrize("scratch", [False, True])
def test_exact_walks_the_targets_own_choices(scratch: bool) -> None:
    lengths = [length for seed in range(12) for length in check_walk(seed, scratch)]
    assert {0, 1, 2} <= set(lengths)


@pytest.mark.parametrize("acceptance", RULES)
def test_scratch_nodes_are_never_accepted(acceptance: str) -> None:
    """Every node carries the only possible token, and would be accepted for certain if it might."""
    logits = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]] * 4)
    case = Case([0], tokens=[0, 0, 0], parents=[-1, 0, 1], scratch=[False, True, False])
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        case.params = params
        assert_verdict(verify(make_judged([case], logits), RULES[acceptance]), 0, case, [0], 0)


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("beside_sampled", [True, False])
def test_greedy_requests_take_the_likeliest_token_under_every_rule(acceptance: str, beside_sampled: bool) -> None:
    """Logits are whole numbers, so many tie: the lowest id wins, whatever q says and whoever else is in the batch."""
    for seed in range(8):
        cases, logits, probs = random_batch(seed, RULES[acceptance].chains_only, RULES[acceptance].needs_probs)
        logits = logits.round()
        for number, case in enumerate(cases):
            if number % 2 == 0 or not beside_sampled:
                case.params = SamplingParams(temperature=0.0)
        verdict = verify(make_judged(cases, logits, probs), RULES[acceptance])
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
        verdict = verify(make_judged(cases, logits), RULES["typical"])
        for row, (case, own) in enumerate(zip(cases, per_case(cases, logits))):
            accepted = stated_typical(case, [softmax(values) for values in own])
            end = accepted[-1] if accepted else -1
            final = noisiest(own[1 + end], case, case.length + len(accepted), SAMPLE, None)
            assert_verdict(verdict, row, case, accepted, final)
            seen.add((len(accepted), len(case.tokens)))
    assert {length for length, _ in seen} >= {0, 1, 2, 3}
    assert any(length < size for length, size in seen)


# Edges

BROKEN = [(name, temperature) for name in RULES for temperature in (0.0, 1.0)]


@pytest.mark.parametrize("broken", [-math.inf, math.nan], ids=["ruled out", "NaN"])
@pytest.mark.parametrize("acceptance, temperature", BROKEN)
def test_a_row_nothing_can_be_sampled_from_gives_minus_one(acceptance: str, broken: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    cases = [Case([0], params=params, tokens=[2, 1], parents=[-1, 0]), Case([0, 1], tokens=[0], parents=[-1])]
    cases.append(Case([0], params=params))
    logits = torch.zeros(6, V)
    logits[0], logits[5] = broken, broken
    logits[3:5] = torch.tensor([0.0, -math.inf, -math.inf, -math.inf])
    verdict = verify(make_judged(cases, logits), RULES[acceptance])
    assert_verdict(verdict, 0, cases[0], [], -1)
    assert_verdict(verdict, 1, cases[1], [0], 0)
    assert_verdict(verdict, 2, cases[2], [], -1)


def test_one_nan_among_numbers_is_enough_for_minus_one() -> None:
    logits = torch.tensor([[1.0, math.nan, 0.0, 5.0]])
    for acceptance in RULES:
        assert verify(make_judged([Case([0])], logits), RULES[acceptance]).tokens.tolist() == [[-1]]


def test_argmax_takes_the_lowest_of_equal_ids() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [0.0, -0.0, 0.0], [-math.inf] * 3, [math.nan, 1, 2], [-math.inf, -5, -5]])
    assert argmax(values).tolist() == [1, 0, -1, -1, 1]


@pytest.mark.parametrize("acceptance", RULES)
def test_padding_is_never_accepted_even_if_its_token_is_the_only_one(acceptance: str) -> None:
    """Padding has token 0, and 0 is all the target can say; a proposal cut by its budget keeps its tokens."""
    logits = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]]).expand(8, V).clone()
    cases = [Case([0], tokens=[0, 0, 0], parents=[-1, 0, 1]), Case([0]), Case([0], tokens=[0, 0], parents=[-1, 0])]
    verdict = verify(make_judged(cases, logits), RULES[acceptance])
    assert verdict.lengths.tolist() == [3, 0, 2]
    judged = make_judged(cases, logits)
    judged.proposal = judged.proposal.cut(torch.tensor([1, 3, 0]))
    assert verify(judged, RULES[acceptance]).lengths.tolist() == [1, 0, 0]


def widened(judged: Judged, extra: int) -> Judged:
    """The same trees in a proposal wider than any of them; what stands in the padding is nonsense."""
    old, batch = judged.proposal, len(judged.index)
    pad = torch.nn.functional.pad
    wide = Proposal(
        torch.cat([old.tokens, torch.full((batch, extra), V - 1)], 1),
        pad(old.parents, (0, extra), value=PADDING),
        old.sizes,
        old.chain,
        None if old.probs is None else pad(old.probs, (0, 0, 0, extra), value=math.nan),
        None if old.scratch is None else pad(old.scratch, (0, extra), value=False),
        old.names,
    )
    rows = torch.arange(batch * extra).view(batch, extra) % len(judged.logits)
    return replace(judged, proposal=wide, index=torch.cat([judged.index, rows], 1))


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("acceptance", RULES)
def test_a_proposal_wider_than_its_trees_is_judged_as_if_it_were_not(acceptance: str, scratch: bool) -> None:
    lengths: set[int] = set()
    for seed in range(8):
        rule = RULES[acceptance]
        cases, logits, probs = random_batch(seed, rule.chains_only or seed % 2 == 0, rule.needs_probs)
        for number, case in enumerate(cases):
            case.params = SamplingParams(temperature=0.0 if number % 5 == 0 else 1.0)
            case.scratch = [number % 3 == 0 and node == 2 for node in range(len(case.tokens))] if scratch else []
        judged = make_judged(cases, logits, probs)
        narrow, wide = verify(judged, rule), verify(widened(judged, 3), rule)
        assert wide.read() == narrow.read()
        assert wide.nodes.shape[1] == narrow.nodes.shape[1] + 3
        lengths |= set(narrow.lengths.tolist())
    assert {0, 1, 2} <= lengths


@pytest.mark.parametrize("acceptance", RULES)
def test_without_any_nodes_each_sequence_gets_one_token(acceptance: str) -> None:
    judged = make_judged([Case([0]), Case([1, 2])], torch.zeros(2, V))
    judged.proposal = Proposal.empty(2, torch.device("cpu"))
    verdict = verify(judged, RULES[acceptance])
    assert verdict.nodes.shape == (2, 0) and verdict.lengths.tolist() == [0, 0]
    assert all(0 <= token < V for token in verdict.tokens[:, 0].tolist())


def test_an_unknown_rule_is_refused_in_a_sentence() -> None:
    with pytest.raises(OptionError, match="acceptance='exakt' is not known; allowed: exact, rejection, block, typical"):
        find_rule("exakt")
    with pytest.raises(OptionError, match="is not known; allowed: exact"):
        find_rule(["exact"])  # type: ignore[arg-type]


def test_no_more_nodes_are_met_than_a_tree_is_deep() -> None:
    """Who looks for accepted nodes need not look at places for as many as there are."""
    sent = torch.arange(2 * 9).view(2, 9)  # tokens, nodes, how many, the size
    assert path_of(Verdict.of(sent, 3, True, 2)).tolist() == [[4, 5], [13, 14]]
    assert path_of(Verdict.of(sent, 3, True, None)).tolist() == [[4, 5, 6], [13, 14, 15]]
