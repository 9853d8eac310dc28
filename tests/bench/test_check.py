"""Whether speculation changes the text: what is sound passes, and planted faults are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from paceline import LLM, NGram, SamplingParams
from paceline.bench import gtest
from paceline.bench.check import Asked, Found, check
from paceline.bench.contexts import choose
from paceline.bench.lens import Lens, Text
from paceline.bench.measured import Answer, Variant
from paceline.drafters.base import Context, QuietDrafter
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError, PacelineError
from paceline.prompts import Prompt
from paceline.sampling import rules
from tests.sampling.spoken import PROMPT, VOCAB, model_of

PARAMS = SamplingParams(temperature=1.5, max_tokens=6, seed=3, ignore_eos=True)


def make_llm(acceptance: str) -> LLM:
    sizes: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 64, "max_batched_tokens": 2048}
    return LLM(model_of(0), None, kernels="torch", acceptance=acceptance, prefix_caching=False, **sizes)


def ask(drafter: Any, params: SamplingParams = PARAMS, **sizes: Any) -> Asked:
    given = {"contexts": 1, "samples": 384, "depth": 3, **sizes}
    return Asked(["first"], [Prompt(None, PROMPT)], params, Variant("drafted", drafter), **given)


class Pretending(QuietDrafter):
    """Drafts the likeliest token, and says it was drawn."""

    name, max_nodes = "pretending", 2

    def propose(self, context: Context) -> Proposal:
        shares = torch.softmax(torch.linspace(1.0, 0.0, VOCAB, dtype=torch.float64), 0)
        count = min(self.max_nodes, context.max_nodes)
        tokens = torch.zeros(len(context.slots), count, dtype=torch.int64)
        probs = shares.expand(len(context.slots), count, VOCAB)
        return Proposal.of_chains(tokens, context.budgets.clamp(max=count), self.name, probs)


class Changing(QuietDrafter):
    """Right about nothing in particular; what it drafts is always token 1."""

    name, max_nodes = "changing", 2

    def propose(self, context: Context) -> Proposal:
        count = min(self.max_nodes, context.max_nodes)
        tokens = torch.ones(len(context.slots), count, dtype=torch.int64)
        return Proposal.of_chains(tokens, context.budgets.clamp(max=count), self.name)


def distribution(found: Found) -> Any:
    assert found.distribution is not None
    return found.distribution


def test_the_papers_rule_passes_and_says_which_bias_it_would_have_found() -> None:
    found = check(make_llm("rejection"), ask(DraftModel(model_of(1), 2)))
    assert found.same and [one.setting for one in found.exact] == ["greedy"]
    spread = distribution(found)
    assert spread.rule == "rejection" and spread.samples == 384 and spread.tokens == 2 * 384
    assert spread.drafted > spread.accepted > 0
    assert 0 < spread.bias < 0.3 and spread.bias < spread.bias_at_one and 0 < spread.bias_in_ranks < 0.25


def test_likeliest_drafts_that_are_verified_as_drawn_are_found() -> None:
    found = check(make_llm("rejection"), ask(Pretending()))
    assert not found.same and found.exact[0].divergences == []  # greedy text stays the same
    spread = distribution(found)
    assert spread.p < spread.alpha and spread.odd
    assert any(one.token == "0" and one.counted > one.expected for one in spread.odd)


def test_a_rule_without_its_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_residual", lambda p, q: p)
    assert not check(make_llm("rejection"), ask(Changing())).same


def test_the_lossy_rule_is_found_by_the_sizes_that_are_the_default() -> None:
    asked = Asked(["first"], [Prompt(None, PROMPT)], PARAMS, Variant("drafted", DraftModel(model_of(1), 2)))
    spread = distribution(check(make_llm("typical"), asked))
    assert not spread.same and spread.p < 1e-9 and spread.odd
    assert (spread.contexts, spread.samples) == (asked.contexts, asked.contexts * asked.samples)


def test_contexts_lie_before_a_first_token_that_is_certain_and_a_drafted_second_that_is_open() -> None:
    llm = make_llm("rejection")
    llm.set_drafter(Changing())
    asked = ask(Changing(), contexts=2)
    output = llm.generate([PROMPT], PARAMS)[0].outputs[0]
    lens = Lens(llm, asked.spoken)
    found = choose(lens, asked.prompts, [Answer(0, output, 0.0)], 2, lambda done, total: None)
    said = output.token_ids
    drafted = [at for at, origin in enumerate(output.provenance) if at and origin.kind in ("accepted", "corrected")]
    assert drafted  # else all places would do

    def score(at: int) -> float:
        before, after = lens.shares([Text(PROMPT, said[: at - 1]), Text(PROMPT, said[:at])])
        return float(before[said[at - 1]] * (1 - (after**2).sum()))

    best = sorted(drafted, key=score, reverse=True)
    assert found == [[*PROMPT, *said[: at - 1]] for at in best[:2]]


def test_a_token_that_cannot_come_is_found_whatever_the_counts() -> None:
    tested = gtest.test(np.array([50.0, 50.0, 1.0]), np.array([0.5, 0.5, 0.0]))
    assert (tested.p, tested.impossible) == (0.0, 1)


def test_the_exact_rule_passes_greedy_and_seeded() -> None:
    found = check(make_llm("exact"), ask(DraftModel(model_of(1), 2)))
    assert found.same and found.distribution is None
    assert [(one.setting, one.answers, one.tokens) for one in found.exact] == [("greedy", 1, 6), ("seeded", 1, 6)]


def test_a_draft_that_is_taken_unchecked_is_shown_with_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    def gullible(judged: Any, choices: Any) -> Any:
        return rules.walk(judged, torch.cat([judged.proposal.tokens, choices[:, -1:]], dim=1))

    llm = make_llm("exact")
    runner = next(value for value in vars(llm.engine).values() if hasattr(value, "rule") and hasattr(value, "state"))
    monkeypatch.setattr(runner, "rule", rules.Rule("exact", gullible))
    found = check(llm, ask(Changing()))
    assert not found.same
    seeded = found.exact[1].divergences[0]
    said = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids  # no drafter is set any more
    at = seeded.position - 1
    assert (seeded.expected, seeded.got) == (str(said[at]), "1")
    assert seeded.margin == Lens(llm, PARAMS).margin(Text(PROMPT, said[:at]), 3) > 0


def test_a_drafter_that_drafts_nothing_checks_nothing() -> None:
    with pytest.raises(PacelineError, match="nothing was drafted, so nothing was checked"):
        check(make_llm("exact"), ask(NGram(2, min_match=7, max_match=7)))


def test_texts_that_never_recur_cannot_be_tested() -> None:
    with pytest.raises(PacelineError, match="no text was said 50 times in 20 samples"):
        check(make_llm("rejection"), ask(Changing(), samples=20))


@pytest.mark.parametrize("given", [{"contexts": 0}, {"samples": 0}, {"depth": 1}, {"alpha": 0.0}])
def test_a_size_that_checks_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(given))}=.* is not allowed; allowed:"):
        ask(Changing(), **given)


def test_the_lens_sees_what_the_pipeline_leaves_with_output_and_prompt_told_apart() -> None:
    llm = make_llm("exact")
    params = SamplingParams(temperature=0.7, top_k=3, frequency_penalty=1.0)
    lens = Lens(llm, params)
    shares = lens.shares([Text(PROMPT, [1, 1]), Text([*PROMPT, 1, 1], [])])
    assert (shares > 0).sum(1).tolist() == [3, 3] and not torch.equal(shares[0], shares[1])
    with torch.no_grad():
        logits = model_of(0)(torch.tensor([[*PROMPT, 1, 1]])).logits[0, -1].clone()
    logits[1] -= 2.0
    best = torch.topk(logits, 3)
    wanted = torch.softmax(best.values.double() / 0.7, 0)
    assert torch.allclose(shares[0][best.indices], wanted, atol=1e-4)


# The test itself, against scipy


def test_chances_and_powers_are_scipys() -> None:
    for statistic, freedom in ((3.0, 1), (40.0, 12), (900.0, 700)):
        assert gtest.chance(statistic, freedom) == pytest.approx(scipy.stats.chi2.sf(statistic, freedom), rel=1e-9)
    found = gtest.find_bias(1000, 12, 1e-4, 0.99)
    assert found is not None
    critical = scipy.stats.chi2.isf(1e-4, 12)
    assert scipy.stats.ncx2.sf(critical, 12, 4 * 1000 * found**2) == pytest.approx(0.99, abs=1e-6)


def test_chance_alone_is_rarely_taken_for_a_bias_and_small_cells_are_thrown_together() -> None:
    draws = np.random.default_rng(0)
    shares = np.array([0.4, 0.3, 0.2, 0.06, 0.02, 0.01, 0.01])
    values = [gtest.test(draws.multinomial(200, shares).astype(float), shares) for _ in range(4000)]
    assert {one.freedom for one in values} == {4}
    found = np.array([one.p for one in values])
    for alpha in (0.1, 0.01):
        assert abs((found < alpha).mean() - alpha) < 4 * np.sqrt(alpha / 4000)
    few = gtest.pool(values[:500])
    assert few.freedom == 2000 and few.p > 1e-3
