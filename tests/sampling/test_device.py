"""Nothing in sampling reads a device's data: on the `meta` device there is none, and any read of it raises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.drafters.tree import Proposal
from paceline.params import SamplingParams
from paceline.sampling.processors import STAGES, process
from paceline.sampling.rules import RULES
from paceline.sampling.state import Rows, SamplerState, Words
from paceline.sampling.verify import Judged, verify
from tests.sampling.checks import Case, make_judged, make_state

META = torch.device("meta")
VOCAB = 11
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.8,
    top_k=5,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={3: 1.0},
    allowed_token_ids=[1, 2, 3, 4],
    bad_words=[[1, 2], [4]],
    min_tokens=3,
)


SHAPES = [(name, chain) for name, rule in RULES.items() for chain in (True, False) if chain or not rule.chains_only]


def moved(judged: Judged, state: SamplerState) -> Judged:
    """The same round on a device without data."""
    old = judged.proposal
    proposal = Proposal(
        old.tokens.to(META),
        old.parents.to(META),
        old.sizes.to(META),
        old.chain,
        None if old.probs is None else old.probs.to(META),
        None if old.scratch is None else old.scratch.to(META),
        old.names,
    )
    rows = judged.rows
    rows = Rows(rows.slots.to(META), rows.slot_list, rows.positions.to(META), rows.drafted.to(META))
    return Judged(proposal, judged.logits.to(META), rows, judged.index.to(META), state)


def round_of(chain: bool, drawn: bool, scratch: bool) -> Judged:
    """A greedy request without wishes beside one with every wish there is."""
    words = Words([[1, 2], [4]], [2, 5])
    parents = [-1, 0, 1] if chain else [-1, -1, 0]
    hidden = [False, True, False] if scratch else []
    cases = [
        Case([1, 2], [3], SamplingParams(temperature=0.0), tokens=[4], parents=[-1]),
        Case([5], [6], EVERYTHING, words, tokens=[7, 8, 9], parents=parents, scratch=hidden),
    ]
    probs = [torch.full((len(case.tokens), VOCAB), 1 / VOCAB) for case in cases] if drawn else None
    judged = make_judged(cases, torch.zeros(6, VOCAB), probs)
    return moved(judged, make_state(cases, VOCAB, META))


def test_reading_on_this_device_raises() -> None:
    judged = round_of(chain=True, drawn=True, scratch=False)
    for read in (torch.Tensor.tolist, torch.Tensor.nonzero, lambda t: bool(t.any()), lambda t: int(t.sum())):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(judged.index)


def test_lengths_the_host_knows_are_trusted_only_where_it_shares_the_tables() -> None:
    cases = [Case([1, 2], [3]), Case([1] * 7)]
    here, apart = make_state(cases, VOCAB).table, make_state(cases, VOCAB, META).table
    assert (here.longest([0]), here.longest([0, 1])) == (3, 7)
    assert apart.longest([0]) == apart.max_length == apart.tokens.tensor.shape[1] - 1


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("acceptance, chain", SHAPES)
def test_a_round_is_processed_and_judged_without_reading_the_device(
    acceptance: str, chain: bool, drawn: bool, scratch: bool
) -> None:
    rule = RULES[acceptance]
    judged = round_of(chain, drawn, scratch)
    left_out = [stage.__name__ for needs, stage in STAGES if not needs(EVERYTHING)]
    assert left_out == ["_functions"], "users' functions, which run on the host, are the one stage that reads"
    judged.state.table.flush()
    logits = process(judged.logits, judged.rows, judged.state)
    verdict = verify(replace(judged, logits=logits), rule)
    assert verdict.tokens.device == META
    assert (verdict.tokens.shape, verdict.nodes.shape, verdict.lengths.shape) == ((2, 4), (2, 3), (2,))
