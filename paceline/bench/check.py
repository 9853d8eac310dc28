"""Does speculation change the text? Token for token where the rule promises that, else by the text's distribution.

    exact         the same prompts with and without the drafter: greedy under every rule, seeded under `exact`
    distribution  many samples after texts of the target's own, each next token counted against what the target says

Knows what is compared; `distribution` knows when samples count as different. Prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from paceline.bench.compare import compare
from paceline.bench.contexts import choose
from paceline.bench.distribution import Distribution, Tell, sample, sharing
from paceline.bench.lens import Lens, spell, to_text
from paceline.bench.measured import Comparison, Plan, Variant
from paceline.errors import OptionError, PacelineError
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.sampling.rules import RULES


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
class Found:
    same: bool
    exact: list[Exact]
    distribution: Distribution | None


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
        with sharing(llm):
            lens, answers = Lens(llm, asked.spoken), greedy.measured[1].passes[0].answers
            contexts = choose(lens, asked.prompts, answers, asked.contexts, partial(tell, "contexts"))
            llm.set_drafter(asked.drafter.drafter)
            spread = sample(llm, asked.spoken, contexts, asked.samples, asked.alpha, tell)
    drafted = sum(one.drafted for one in exact) + (0 if spread is None else spread.drafted)
    if not drafted:
        raise PacelineError("nothing was drafted, so nothing was checked; give other prompts or another drafter")
    same = not any(one.divergences for one in exact) and (spread is None or spread.same)
    return Found(same, exact, spread)


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
        wanted, got = spell(llm, found.expected), spell(llm, found.got)
        divergences.append(Divergence(result.plan.names[found.prompt], found.position + 1, wanted, got, margin))
    answers = len(drafted.passes[0].answers)
    return Exact(setting, answers, stats.tokens, sum(stats.proposed), sum(stats.accepted), divergences)
