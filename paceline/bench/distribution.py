"""Do samples with a drafter have the target's distribution? Each next token is counted against what the target says.

Knows what is counted and when it counts as different. Prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from paceline.bench import gtest
from paceline.bench.lens import Lens, Text, spell
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.outputs import CompletionOutput
from paceline.params import SamplingParams

POWER = 0.99
FEWEST = 50  # samples after a text that are worth a test
MOST_TEXTS = 256  # of a context, the commonest first; for each the target is asked once
BINS = 20  # of ranks
TOGETHER = 256  # samples asked for at once, so that progress is seen

Tell = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(frozen=True)
class Odd:
    """A text after which tokens were counted that the target would not have said so often, or so seldom."""

    after: str
    token: str
    counted: int
    expected: float
    samples: int
    p: float  # of this test alone


@dataclass(frozen=True)
class Distribution:
    """All tests of the sampled text. p: the smallest, times their number."""

    rule: str
    contexts: int
    samples: int
    tokens: int  # counted in the tests
    drafted: int
    accepted: int
    tests: int
    p: float
    ranks: float  # the p of that test alone
    alpha: float
    bias: float | None  # total variation at every place: found with POWER
    bias_at_one: float | None  # the same at one place alone, the commonest
    bias_in_ranks: float | None  # the same in how likely the tokens are that are said
    odd: list[Odd]

    @property
    def same(self) -> bool:
        return self.p >= self.alpha


def sample(
    llm: LLM, params: SamplingParams, contexts: list[list[int]], samples: int, alpha: float, tell: Tell
) -> Distribution:
    """So many samples after each context, with the drafter that is set, and the tests of them; then none is set.

    A sample's last token is not counted: no draft comes there.
    """
    gathered, drafted, accepted = [], 0, 0
    total, depth = len(contexts) * samples, (params.max_tokens or 1) - 1
    for number, context in enumerate(contexts):
        _read(llm, context, depth + 1)
        texts: list[list[int]] = []
        for first in range(number * samples, (number + 1) * samples, TOGETHER):
            tell("samples", first, total)
            count = min(TOGETHER, (number + 1) * samples - first)
            for output in _speak(llm, params, context, count, first):
                texts.append(output.token_ids[:depth])
                drafted, accepted = drafted + sum(output.stats.proposed), accepted + sum(output.stats.accepted)
        gathered.append(texts)
    tell("samples", total, total)
    tests = _Tests(llm, params)
    for number, (context, texts) in enumerate(zip(contexts, gathered)):
        tell("target", number, len(contexts))
        tests.add(context, texts)
    tell("target", len(contexts), len(contexts))
    return tests.conclude(len(contexts), samples, drafted, accepted, alpha)


@contextmanager
def sharing(llm: LLM) -> Iterator[None]:
    """Samples find the pages of the context they go on from; what ran before this left none to be found."""
    scheduler = llm.engine.scheduler
    before, scheduler.prefix_caching = scheduler.prefix_caching, True
    try:
        yield
    finally:
        scheduler.prefix_caching = before


def _read(llm: LLM, context: list[int], count: int) -> None:
    """Once for all samples: with the drafter, which else would not see what lies on the pages they share."""
    llm.generate([context], SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))


def _speak(llm: LLM, params: SamplingParams, context: list[int], count: int, number: int) -> list[CompletionOutput]:
    """Some samples after a context; every call has a seed of its own."""
    seed = (params.seed or 0) + number
    return llm.generate([context], replace(params, n=count, seed=seed))[0].outputs


class _Tests:
    """What was counted against what the target says: each text that was said often by itself, and all of them by rank.

    By rank: where a token lies among the target's, the likeliest first, as a number from 0 to 1, spread by chance over
    its own share. Such numbers are uniform whatever came before, so texts that were said once are counted too.
    """

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._lens = llm, Lens(llm, params)
        self._draws = np.random.default_rng(params.seed or 0)
        self.alone: list[tuple[gtest.Tested, Odd]] = []
        self._ranks: list[float] = []

    def add(self, context: list[int], texts: list[list[int]]) -> None:
        """Samples after a context: drafts may have reached all but each one's first token."""
        after: dict[tuple[int, ...], Counter[int]] = {}
        for said in texts:
            for place in range(1, len(said)):
                after.setdefault(tuple(said[:place]), Counter())[said[place]] += 1
        often = sorted(after, key=lambda prefix: -after[prefix].total())[:MOST_TEXTS]
        for first in range(0, len(often), TOGETHER):
            some = often[first : first + TOGETHER]
            rows = self._lens.shares([Text(context, list(prefix)) for prefix in some]).numpy()
            for prefix, shares in zip(some, rows):
                self._count(list(prefix), after[prefix], shares)

    def _count(self, said: list[int], after: Counter[int], shares: gtest.Array) -> None:
        for token, count in after.items():
            own = shares[token]
            above = shares[shares > own].sum() + shares[:token][shares[:token] == own].sum()
            self._ranks += (above + self._draws.random(count) * own).tolist()
        if after.total() >= FEWEST:
            counts = np.zeros(len(shares))
            counts[list(after)] = list(after.values())
            tested = gtest.test(counts, shares)
            self.alone.append((tested, self._describe(said, counts, shares, tested)))

    def _describe(self, said: list[int], counts: gtest.Array, shares: gtest.Array, tested: gtest.Tested) -> Odd:
        """By the token that is furthest from what was expected of it."""
        expected = tested.samples * shares
        token = int(np.abs(counts - expected).argmax())
        words = ", ".join(spell(self._llm, one) for one in said)
        found, hoped = int(counts[token]), float(expected[token])
        return Odd(words, spell(self._llm, token), found, hoped, tested.samples, tested.p)

    def ranked(self) -> gtest.Tested:
        counts = np.bincount([min(int(rank * BINS), BINS - 1) for rank in self._ranks], minlength=BINS)
        return gtest.test(counts.astype(np.float64), np.full(BINS, 1 / BINS))

    def conclude(self, contexts: int, samples: int, drafted: int, accepted: int, alpha: float) -> Distribution:
        """Each text alone, all together, and ranks; the smallest p counts times the number of tests (Bonferroni)."""
        tested = [one for one, _ in self.alone]
        if not tested:
            raise PacelineError(
                f"no text was said {FEWEST} times in {samples} samples, so nothing can be tested; give more samples, "
                "or a lower temperature"
            )
        pooled, ranked = gtest.pool(tested), self.ranked()
        count = len(tested) + 2
        level = alpha / count
        commonest = max(tested, key=lambda one: one.samples)
        odd = sorted((one for _, one in self.alone if one.p < level), key=lambda one: one.p)
        return Distribution(
            rule=self._llm.options.acceptance,
            contexts=contexts,
            samples=contexts * samples,
            tokens=ranked.samples,
            drafted=drafted,
            accepted=accepted,
            tests=count,
            p=min(1.0, count * min(pooled.p, ranked.p, *(one.p for one in tested))),
            ranks=ranked.p,
            alpha=alpha,
            bias=gtest.find_bias(pooled.samples, pooled.freedom, level, POWER),
            bias_at_one=gtest.find_bias(commonest.samples, commonest.freedom, level, POWER),
            bias_in_ranks=gtest.find_bias(ranked.samples, ranked.freedom, level, POWER),
            odd=odd[:5],
        )
