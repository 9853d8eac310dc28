"""The one layout in which measurements are kept: what every command that measures writes, and all that reports read.

    kind                        compare | sweep | offline | serve | check (the last three: see `kinds`)
    command, date, versions, machine, revision, options, interrupted: `head`, the same in all of them
    interval                    how the intervals were found
    prompts                     name, text, tokens
    variants                    plain first: every figure, and every answer with whether it is plain's
    best                        of a sweep: the draft length and what is said of it
    shown                       a few answers, piece by piece with the origin of each
    default, speculative, ngram of a comparison: texts, token ids and timings of plain decoding, of the draft model and
                                of the n-gram drafter; null where there was none, and then NAME_reason says why.
                                Other drafters stand beside them under their own names.

Measures nothing, draws nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from paceline import pieces
from paceline.bench import interval, machine, sweep
from paceline.bench.measured import Answer, Comparison, Measured, Variant
from paceline.drafters.table import find_config

FIELDS = {"speculative": "draft model", "ngram": "n-gram drafter"}  # the names that scripts know, and of what
MAX_SHOWN = 3  # answers
MAX_PIECES = 160  # tokens of each


def record(kind: str, result: Comparison, tokenizer: Any, command: str, options: dict[str, Any]) -> dict[str, Any]:
    """A measurement as plain data."""
    data = {**head(kind, command, options, result.interrupted), **record_figures(result)}
    best = sweep.find_best(result) if kind == "sweep" else None
    if best is not None:
        data["best"] = {
            "draft_length": best.length,
            "speed_up": best.speed_up.value,
            "speed_up_interval": _bounds(best.speed_up),
            "rivals": best.rivals,
            "verdict": best.verdict,
        }
    data["shown"] = _record_shown(result, None if best is None else best.length, tokenizer)
    if kind == "compare":
        data |= _record_fields(result, data)
    return data


def head(kind: str, command: str, options: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """What stands first in every file."""
    told = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return {"kind": kind, "command": command, **machine.record(), "options": told, "interrupted": interrupted}


def record_figures(result: Comparison) -> dict[str, Any]:
    """What was asked, and every figure of every variant."""
    return {
        "interval": interval.method(),
        "prompts": [
            {"name": name, "text": prompt.text, "tokens": len(prompt.ids)}
            for name, prompt in zip(result.plan.names, result.plan.prompts)
        ],
        "variants": _record_variants(result),
    }


def labels(variants: list[Variant]) -> list[str]:
    """Short names: a draft model's own, else the word before the options; a letter tells those that share one apart."""
    words = [_word(variant) for variant in variants]
    letters = {word: iter(ascii_lowercase + ascii_uppercase) for word in words}
    return [
        word if words.count(word) == 1 else f"{word} {next(letters[word], variant.name)}"
        for word, variant in zip(words, variants)
    ]


def _word(variant: Variant) -> str:
    model = getattr(variant.drafter, "model", None)
    if variant.peer is not None:
        return variant.name
    if variant.draft_length is not None:
        return f"{variant.draft_length} drafted"
    if isinstance(model, str | Path):
        return Path(model).name
    return Path(variant.name.partition(":")[0]).name


def _record_variants(result: Comparison) -> list[dict[str, Any]]:
    names = labels([measured.variant for measured in result.measured])
    return [
        {"name": measured.variant.name, "label": label, **_record_variant(result, measured)}
        for measured, label in zip(result.measured, names)
    ]


def _record_variant(result: Comparison, measured: Measured) -> dict[str, Any]:
    """What is known of any, and of our own how they came by it."""
    shared = _record_outcome(result, measured)
    if measured.variant.peer is not None:
        return {"peer": True, **shared}
    stats, config, first = measured.stats, measured.variant.drafter, measured.passes[0]
    forwards = result.forward_speed_up(measured)
    return {
        "drafter": None if config is None else repr(config),
        "draft_length": measured.variant.draft_length,
        "trees": config is not None and config.create().trees,
        "forwards": sum(answer.output.stats.rounds for answer in first.answers),
        "forward_speed_up": forwards.value,
        "forward_speed_up_interval": None if measured is result.plain else _bounds(forwards),
        "tokens_per_forward": stats.tokens_per_forward,
        "acceptance": stats.acceptance if sum(stats.proposed) else None,
        "acceptance_by_position": stats.acceptance_by_position,
        "proposed_by_position": stats.proposed,
        "repeated_4grams": sweep.repeated_share(answer.output.token_ids for answer in first.answers),
        "draft_seconds": [done.draft_seconds for done in measured.passes],
        "verify_seconds": [done.verify_seconds for done in measured.passes],
        "rest_seconds": [done.rest_seconds for done in measured.passes],
        **shared,
    }


def _record_outcome(result: Comparison, measured: Measured) -> dict[str, Any]:
    """Times and answers."""
    time, first = result.speed_up(measured), measured.passes[0]
    return {
        "seconds": [done.seconds for done in measured.passes],
        "median_seconds": measured.seconds,
        "tokens": first.tokens,
        "tokens_per_second": measured.tokens_per_second,
        "speed_up": time.value,
        "speed_up_interval": None if measured is result.plain else _bounds(time),
        "complete": first.complete,
        "answered": len(first.answers),
        "identical": measured.num_identical,
        "answers": _record_answers(result, measured),
    }


def _bounds(found: interval.Estimate) -> list[float] | None:
    return None if found.low is None or found.high is None else [found.low, found.high]


def _record_answers(result: Comparison, measured: Measured) -> list[dict[str, Any]]:
    """Of the first pass; a difference may be of another."""
    differing = {found.prompt: found for found in measured.differences}
    return [
        {
            "prompt": result.plan.names[answer.prompt],
            "text": answer.output.text,
            "token_ids": answer.output.token_ids,
            "finish_reason": answer.output.finish_reason,
            "identical": answer.prompt not in differing,
            "difference": asdict(differing[answer.prompt]) if answer.prompt in differing else None,
        }
        for answer in measured.passes[0].answers
    ]


# default, speculative, ngram


def _record_fields(result: Comparison, taken: dict[str, Any]) -> dict[str, Any]:
    """Every variant under the name that scripts know, or its own."""
    fields: dict[str, Any] = {"default": _record_run(result.plain)}
    left = result.measured[1:]
    for name in FIELDS:
        found = next((measured for measured in left if _field(measured.variant) == name), None)
        fields[name] = None if found is None else _record_run(found)
        if found is None:
            fields[f"{name}_reason"] = _reason(result, name)
        else:
            left.remove(found)
    for measured in left:
        name = measured.variant.name
        fields[f"drafter {name}" if name in taken or name in fields else name] = _record_run(measured)
    return fields


def _field(variant: Variant) -> str | None:
    """The name that scripts know a variant by: a drafter with a model of its own is the speculative one."""
    kind = find_config(variant.drafter)
    if kind is None:
        return None
    return "speculative" if kind.has_model else kind.word


def _reason(result: Comparison, name: str) -> str:
    if any(_field(variant) == name for variant in result.plan.drafters):
        return "interrupted before it had an answer"
    return f"not asked for: no {FIELDS[name]} was named"


def _record_run(measured: Measured) -> dict[str, Any]:
    config = measured.variant.drafter
    answers = measured.passes[0].answers
    return {
        "name": measured.variant.name,
        "drafter": None if config is None else repr(config),
        "prompts": [answer.prompt for answer in answers],
        "texts": [answer.output.text for answer in answers],
        "token_ids": [answer.output.token_ids for answer in answers],
        "seconds": [[answer.seconds for answer in done.answers] for done in measured.passes],
        "total_seconds": [done.seconds for done in measured.passes],
    }


# Answers to be looked at


def _record_shown(result: Comparison, length: int | None, tokenizer: Any) -> list[dict[str, Any]]:
    if tokenizer is None:
        return []
    shown = []
    names = labels([measured.variant for measured in result.measured])
    for measured, answer in choose_answers(result, length):
        output, prompt = answer.output, result.plan.prompts[answer.prompt]
        told = pieces.pieces(output.token_ids, output.provenance, tokenizer, prompt.ids, output.text, MAX_PIECES)
        shown.append(
            {
                "variant": names[result.measured.index(measured)],
                "prompt": result.plan.names[answer.prompt],
                "tokens": len(output.token_ids),
                "forwards": output.stats.rounds,
                "cut": len(output.token_ids) > MAX_PIECES,
                "pieces": [[text, origin.kind, origin.drafter] for text, origin in told],
            }
        )
    return shown


def choose_answers(result: Comparison, length: int | None = None) -> list[tuple[Measured, Answer]]:
    """Those that show drafting best: plain's text, most of it drafted, each of another prompt, drafters in turn."""
    rest = [m for m in result.measured[1:] if length is None or m.variant.draft_length == length]
    chosen: list[tuple[Measured, Answer]] = []
    while len(chosen) < MAX_SHOWN:
        before = len(chosen)
        for measured in rest:
            taken = {answer.prompt for _, answer in chosen} | {found.prompt for found in measured.differences}
            offered = [a for a in measured.passes[0].answers if a.prompt not in taken and _drafted(a)]
            if offered and len(chosen) < MAX_SHOWN:
                chosen.append((measured, max(offered, key=_drafted)))
        if len(chosen) == before:
            break
    return chosen


def _drafted(answer: Answer) -> float:
    """The share of its tokens that were drafted."""
    told = answer.output.provenance[:MAX_PIECES]
    return sum(origin.kind == "accepted" for origin in told) / len(told) if told else 0.0


# Files

_NUMBERS = re.compile(r"\[\n\s+([-+.\deE]+(?:,\n\s+[-+.\deE]+)*)\n\s+\]")


def to_text(data: dict[str, Any]) -> str:
    """As JSON, a list of numbers on one line. No string is touched: a line break in one is written as \\n."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return _NUMBERS.sub(lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text) + "\n"


def write(path: Path, data: dict[str, Any]) -> None:
    """For the scripts that measure again what they measured before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_text(data), encoding="utf-8")
