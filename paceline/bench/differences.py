"""Where an answer left the plain one, and whether that was a tie. Knows token ids; must not know what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.prompts import Prompt


@dataclass(frozen=True)
class Difference:
    """The first token that differs, and how far apart the target's two likeliest tokens were there."""

    prompt: int
    round: int
    position: int  # of the first differing token, counted from the answer's first
    expected: int | None  # None: the plain answer had ended
    got: int | None
    margin: float | None  # of log-probabilities; None: not recomputed (sampled text, or interrupted)


def first_difference(
    number: int, plain: list[int], answers: list[list[int]], prompt: Prompt, llm: LLM | None
) -> Difference | None:
    """The first round in which a prompt's answer is not the plain one; with an `llm`, its margin."""
    for round, ids in enumerate(answers):
        for position, (expected, got) in enumerate(zip_longest(plain, ids)):
            if expected != got:
                margin = None if llm is None else find_margin(llm, [*prompt.ids, *plain[:position]])
                return Difference(number, round, position, expected, got, margin)
    return None


def find_margin(llm: LLM, prefix: list[int]) -> float | None:
    """How far apart the two likeliest tokens are after a prefix: next to nothing is a rounding tie."""
    llm.set_drafter(None)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, ignore_eos=True)
    output = llm.generate([prefix], params)[0].outputs[0]
    if not output.logprobs:
        return None
    first, second = sorted((entry.logprob for entry in output.logprobs[0].values()), reverse=True)[:2]
    return first - second
