"""Does speculation change the text? Token for token where the rule promises that, else by the text's distribution.

    exact         the same prompts with and without the drafter: greedy under every rule, seeded under `exact`
    distribution  many samples after texts of the target's own, each next token counted against what the target says

Knows what is compared and when it counts as different. Prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from paceline.bench import gtest
from paceline.bench.compare import Comparison, Plan, Variant, compare
from paceline.bench.contexts import choose
from paceline.bench.lens import Lens, Text, to_text
from paceline.errors import OptionError, PacelineError
from paceline.llm import LLM
from paceline.outputs import CompletionOutput
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.sampling.rules import RULES

POWER = 0.99
FEWEST = 50  # samples after a text that are worth a test
MOST_TEXTS = 256  # of a context, the commonest first; for each the target is asked once
BINS = 20  # of ranks
TOGETHER = 256  # samples asked for at once, so that progress is seen


@dataclass(frozen=True)
class Asked:
    """What is checked. samples: of each context; depth: tokens of each; alpha: how often it may cry wolf."""

    names: list[str]
    prompts: list[Prompt]
    params: SamplingParams
    drafter: Variant
    contexts: int = 4
    samples: int = 800
    depth: int = 4
    alpha: float = 0.001

    def __post_init__(self) -> None:
        for name in ("contexts", "samples"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} is not allowed; allowed: 1 or more")
        if self.depth < 2:
            raise OptionError(
                f"depth={self.depth} is not allowed; allowed: 2 or more, since the first is never drafted"
            )
        if not 0 < self.alpha < 1:
            raise OptionError(f"alpha={self.alpha} is not allowed; allowed: above 0 and below 1")

    @property
    def spoken(self) -> SamplingParams:
        """The same for samples, which are short: one token more, since an answer's last is never a draft."""
        return replace(self.params, max_tokens=self.depth + 1, min_tokens=min(self.params.min_tokens, self.depth))


@dataclass(frozen=True)
class Divergence:
    """Where an answer left plain decoding's. margin: how far apart the target's two best tokens were there."""

    prompt: str
    position: int  # from 1
    expected: str
    got: str
    margin: float


@dataclass(frozen=True)
class Exact:
    """One setting's answers."""

    setting: str  # greedy | seeded
    answers: int
    tokens: int
    drafted: int
    accepted: int
    divergences: list[Divergence]


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


@dataclass(frozen=True)
class Found:
    same: bool
    exact: list[Exact]
    distribution: Distribution | None


Tell = Callable[[str, int, int], None]  # what, done, of how many


def check(llm: LLM, asked: Asked, tell: Tell = lambda what, done, total: None) -> Found:
    """Run it. Raises where nothing was drafted: then nothing was checked."""
    rule = RULES[llm.options.acceptance]
    settings = {"greedy": replace(asked.params, temperature=0.0)}
    if rule.follows and not asked.params.greedy:
        settings["seeded"] = asked.params
    exact, greedy = [], None
    for setting, params in settings.items():
        result = _compare(llm, asked, setting, params, tell)
        greedy = greedy or result
        exact.append(_judge(llm, result, setting, params))
    spread = None
    if not rule.follows and not asked.params.greedy:
        assert greedy is not None
        with _sharing(llm):
            spread = _sample(llm, asked, greedy, tell)
    drafted = sum(one.drafted for one in exact) + (0 if spread is None else spread.drafted)
    if not drafted:
        raise PacelineError("nothing was drafted, so nothing was checked; give other prompts or another drafter")
    same = not any(one.divergences for one in exact) and (spread is None or spread.same)
    return Found(same, exact, spread)


# Token for token


def _compare(llm: LLM, asked: Asked, setting: str, params: SamplingParams, tell: Tell) -> Comparison:
    plan = Plan(asked.names, asked.prompts, params, [asked.drafter])
    done: dict[str, int] = {}

    def told(variant: str, round: int, ready: int) -> None:
        if round >= 0:
            done[variant] = ready
            tell(setting, sum(done.values()), 2 * len(asked.prompts))

    result = compare(llm, plan, told)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def _judge(llm: LLM, result: Comparison, setting: str, params: SamplingParams) -> Exact:
    plain, drafted = result.measured
    stats, lens = drafted.stats, Lens(llm, params)
    divergences = []
    for found in drafted.differences:
        said = next(a.output.token_ids for a in plain.passes[0].answers if a.prompt == found.prompt)
        text = to_text(result.plan.prompts[found.prompt], said[: found.position])
        margin = lens.margin(text, params.seed or 0)
        wanted, got = _spell(llm, found.expected), _spell(llm, found.got)
        divergences.append(Divergence(result.plan.names[found.prompt], found.position + 1, wanted, got, margin))
    answers = len(drafted.passes[0].answers)
    return Exact(setting, answers, stats.tokens, sum(stats.proposed), sum(stats.accepted), divergences)


def _spell(llm: LLM, token: int | None) -> str:
    if token is None:
        return "the end"
    text = "" if llm.tokenizer is None else repr(llm.tokenizer.decode([token]))
    return f"{token} {text}".strip()


# By distribution


@contextmanager
def _sharing(llm: LLM) -> Iterator[None]:
    """Samples find the pages of the context they go on from; what ran before this left none to be found."""
    scheduler = llm.engine.scheduler
    before, scheduler.prefix_caching = scheduler.prefix_caching, True
    try:
        yield
    finally:
        scheduler.prefix_caching = before


def _sample(llm: LLM, asked: Asked, greedy: Comparison, tell: Tell) -> Distribution:
    """Choose contexts by what the target says, sample after them with the drafter, and ask the target again."""
    lens = Lens(llm, asked.spoken)
    answers = greedy.measured[1].passes[0].answers
    contexts = choose(lens, asked.prompts, answers, asked.contexts, partial(tell, "contexts"))
    llm.set_drafter(asked.drafter.drafter)
    gathered, drafted, accepted = [], 0, 0
    total = len(contexts) * asked.samples
    for number, context in enumerate(contexts):
        _read(llm, asked, context)
        texts: list[list[int]] = []
        for first in range(0, asked.samples, TOGETHER):
            done = number * asked.samples + first
            tell("samples", done, total)
            for output in _speak(llm, asked, context, min(TOGETHER, asked.samples - first), done):
                texts.append(output.token_ids[: asked.depth])
                drafted, accepted = drafted + sum(output.stats.proposed), accepted + sum(output.stats.accepted)
        gathered.append(texts)
    tell("samples", total, total)
    tests = _Tests(llm, lens, asked.params.seed or 0)
    for number, (context, texts) in enumerate(zip(contexts, gathered)):
        tell("target", number, len(contexts))
        tests.add(context, texts)
    tell("target", len(contexts), len(contexts))
    return _conclude(llm, asked, tests, drafted, accepted)


def _read(llm: LLM, asked: Asked, context: list[int]) -> None:
    """Once for all samples: with the drafter, which else would not see what lies on the pages they share."""
    llm.generate([context], SamplingParams(temperature=0.0, max_tokens=asked.depth + 1, ignore_eos=True))


def _speak(llm: LLM, asked: Asked, context: list[int], count: int, number: int) -> list[CompletionOutput]:
    """Some samples after a context; every call has a seed of its own."""
    seed = (asked.params.seed or 0) + number
    return llm.generate([context], replace(asked.spoken, n=count, seed=seed))[0].outputs


class _Tests:
    """What was counted against what the target says: each text that was said often by itself, and all of them by rank.

    By rank: where a token lies among the target's, the likeliest first, as a number from 0 to 1, spread by chance over
    its own share. Such numbers are uniform whatever came before, so texts that were said once are counted too.
    """

    def __init__(self, llm: LLM, lens: Lens, seed: int) -> None:
        self._llm, self._lens = llm, lens
        self._draws = np.random.default_rng(seed)
        self.alone: list[tuple[gtest.Tested, Odd]] = []
        self._ranks: list[float] = []
        self.contexts = 0

    def add(self, context: list[int], texts: list[list[int]]) -> None:
        """Samples after a context: drafts may have reached all but each one's first token."""
        self.contexts += 1
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
        words = ", ".join(_spell(self._llm, one) for one in said)
        found, hoped = int(counts[token]), float(expected[token])
        return Odd(words, _spell(self._llm, token), found, hoped, tested.samples, tested.p)

    def ranked(self) -> gtest.Tested:
        counts = np.bincount([min(int(rank * BINS), BINS - 1) for rank in self._ranks], minlength=BINS)
        return gtest.test(counts.astype(np.float64), np.full(BINS, 1 / BINS))


def _conclude(llm: LLM, asked: Asked, tests: _Tests, drafted: int, accepted: int) -> Distribution:
    """Each text alone, all together, and ranks; the smallest p is multiplied by the number of tests (Bonferroni)."""
    tested = [one for one, _ in tests.alone]
    if not tested:
        raise PacelineError(
            f"no text was said {FEWEST} times in {asked.samples} samples, so nothing can be tested; give more samples, "
            "or a lower temperature"
        )
    pooled, ranked = gtest.pool(tested), tests.ranked()
    count = len(tested) + 2
    level = asked.alpha / count
    commonest = max(tested, key=lambda one: one.samples)
    odd = sorted((one for _, one in tests.alone if one.p < level), key=lambda one: one.p)
    return Distribution(
        rule=llm.options.acceptance,
        contexts=tests.contexts,
        samples=tests.contexts * asked.samples,
        tokens=ranked.samples,
        drafted=drafted,
        accepted=accepted,
        tests=count,
        p=min(1.0, count * min(pooled.p, ranked.p, *(one.p for one in tested))),
        ranks=ranked.p,
        alpha=asked.alpha,
        bias=gtest.find_bias(pooled.samples, pooled.freedom, level, POWER),
        bias_at_one=gtest.find_bias(commonest.samples, commonest.freedom, level, POWER),
        bias_in_ranks=gtest.find_bias(ranked.samples, ranked.freedom, level, POWER),
        odd=odd[:5],
    )
