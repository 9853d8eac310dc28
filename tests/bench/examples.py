"""Measurements made by hand, for tests of what is said about them."""

from __future__ import annotations

from typing import Any

from paceline import NGram, SamplingParams
from paceline.bench import results
from paceline.bench.measured import Answer, Comparison, Measured, Pass, Plan, Variant
from paceline.cli import drafters
from paceline.engine.sequence import Provenance
from paceline.engine.stats import SequenceStats
from paceline.outputs import CompletionOutput
from paceline.prompts import Prompt
from tests.cli.checkpoints import make_tokenizer

TOKENIZER = make_tokenizer()
IDS = TOKENIZER.encode("the riders rest — then the line goes on")
OPTIONS = {"model": "some/folder/tiny", "max_tokens": 20, "batch_size": 1, "temperature": 0.0}


def output(ids: list[int], accepted: int) -> CompletionOutput:
    """An answer of which the first `accepted` tokens were drafted, one round each of two."""
    told = [Provenance("x", "accepted", 0, depth + 1) for depth in range(accepted)]
    told += [Provenance(None, "corrected", 0, accepted + 1)] if accepted else []
    told += [Provenance(None, "plain", n, 1) for n in range(len(ids) - len(told))]
    stats = SequenceStats(rounds=len(ids) - accepted, tokens=len(ids))
    if accepted:
        stats.proposed, stats.accepted = [4] * (accepted + 1), [2] * accepted + [0]
    return CompletionOutput(0, TOKENIZER.decode(ids), ids, "length", None, None, 0, stats, told)


def variant_of(name: str) -> Variant:
    return Variant(name, NGram(int(name)), int(name)) if name.isdigit() else Variant(name, drafters.parse(name))


def comparison(seconds: dict[str, list[float]], rounds: int = 1) -> Comparison:
    """Variants by name (a number is a draft length) and what each of their answers took; the last answer is short."""
    count = len(seconds["plain"])
    names = [f"prompt {number}" for number in range(count)]
    prompts = [Prompt(f"text {number}", [1] * (number + 1)) for number in range(count)]
    drafters = [variant_of(name) for name in seconds if name != "plain"]
    plan = Plan(names, prompts, SamplingParams(temperature=0.0), drafters, rounds)
    measured = []
    for variant in plan.variants:
        spent, drafted = seconds[variant.name], variant.drafter is not None
        answers = [Answer(number, output(IDS, 3 if drafted else 0), time) for number, time in enumerate(spent)]
        if count > 1:
            answers[-1].output = output(IDS[:6], 5 if drafted else 0)
        parts = {"draft_seconds": 0.1 * sum(spent) * drafted, "verify_seconds": 0.8 * sum(spent)}
        passes = [Pass(sum(spent), answers, rest_seconds=0.05 * sum(spent), **parts) for _ in range(rounds)]
        measured.append(Measured(variant, passes))
    return Comparison(plan, measured)


def record(result: Comparison, kind: str = "compare") -> dict[str, Any]:
    return results.record(kind, result, TOKENIZER, f"paceline {kind}", dict(OPTIONS))


def example(*names: str) -> Comparison:
    """Two prompts; plain decoding takes 2 seconds, the first drafter 1, the next 2, and so on."""
    drafters = {name: [(1.0 + place) * 0.75, (1.0 + place) * 0.25] for place, name in enumerate(names)}
    return comparison({"plain": [1.5, 0.5], **drafters})
