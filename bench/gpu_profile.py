"""The parts of gpu.py that look into rounds: those with drafts of known luck, and where a round's time goes."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_common import LONG, PROMPT, Bench, Row, asking, greedy, per_round, random_prompts, rounds_of, timed
from gpu_drafters import Fixed

from paceline import LLM, Eagle

IDLE = "none"  # of the kernels runs
PROFILED = "EAGLE-shaped, 5 drafts"  # of the rounds with drafts of made-up weights


def known_rounds(bench: Bench, llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Drafters of rounds whose luck is known, and the EAGLE-shaped one."""
    _, outputs = timed(llm, prompts, greedy(24 if bench.quick else 176))
    recorded = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}
    return {
        "8 rows, all accepted": Fixed(recorded, 7, right=True),
        "8 rows, none accepted": Fixed(recorded, 7, right=False),
        "EAGLE-shaped, 5 drafts": Eagle(bench.head(bench.options.shapes[0]), 5),
        "EAGLE-shaped, fixed tree of 15": Eagle(bench.head(bench.options.shapes[0]), 15, tree="static"),
        "EAGLE-shaped, grown tree of 15": Eagle(bench.head(bench.options.shapes[0]), 15, tree="dynamic", depth=2),
    }


def profile(bench: Bench) -> Iterator[Row]:
    """The kernels of a round, by what each adds to its end: they overlap.

    With --head also of the small model's rounds, sampled: there they are drawn as well.
    """
    shape = bench.options.shapes[0]
    for batch in bench.batches(1, 64):
        alike = {"max_num_seqs": batch, "budget": "fixed", "num_pages": batch * 65 + 64}
        make = functools.partial(bench.dummy, shape, **alike)
        with make() as llm:
            prompts = random_prompts(batch, 16 if bench.quick else PROMPT, llm.config.vocab_size)
            known = known_rounds(bench, llm, prompts) if batch == 1 else {}
        rounds = {"plain": None, **{name: drafter for name, drafter in known.items() if name == PROFILED}}
        yield from _profile(bench, {"shape": shape, "batch": batch}, make, prompts, rounds)
    for batch in bench.batches(1) if bench.options.head else ():
        length = 128 if bench.quick else 1024
        alike = {"max_num_seqs": batch, "budget": "fixed", "max_model_len": length}
        make = functools.partial(bench.llm, bench.options.small, num_pages=batch * (length // 16 + 1), **alike)
        with make() as llm:
            texts = [] if llm.tokenizer is None else bench.texts("mt_bench.jsonl")
            prompts = asking(llm, texts, batch, 24 if bench.quick else LONG)
            name = Path(llm.engine.target.origin).name
        rounds = {"plain": None, **bench.heads(3)}
        yield from _profile(bench, {"shape": name, "batch": batch}, make, prompts, rounds, temperature=0.8, seed=0)


def _profile(
    bench: Bench,
    told: dict[str, Any],
    make: Callable[[], LLM],
    prompts: list[list[int]],
    rounds: dict[str, Any],
    **sampling: Any,
) -> Iterator[Row]:
    """Of rounds with each drafter."""

    with make() as llm:
        for name, drafter in rounds.items():
            llm.set_drafter(drafter)
            spent = per_round(llm, prompts, bench.options.turns, bench.quick, **sampling)["ms"]
            sums = kernels_of(llm, prompts, (24, 8) if bench.quick else (96, 64), **sampling)
            idle = sums.pop(IDLE, 0.0)
            kernels = sorted(((said[:80], ms) for said, ms in sums.items() if ms > 0), key=lambda item: -item[1])
            row = {**told, "round": name, "step_ms": spent, "kernels_ms": sum(sums.values()), "idle_ms": idle}
            row |= {"kernels": [{"kernel": said, "ms": ms} for said, ms in kernels[:40]], "sampling": sampling}
            figures = f"{spent:.3f} ms a round; profiled {row['kernels_ms']:.3f} in kernels, {idle:.3f} between them"
            print(f"{told['shape']}, {told['batch']} sequences, {name}: {figures}", flush=True)
            yield row


def kernels_of(llm: LLM, prompts: list[list[int]], sizes: tuple[int, int], **sampling: Any) -> dict[str, float]:
    """Milliseconds that each adds to a round, by its name and how many programs it has: of the rounds between two sizes
    of an answer, the smaller of which is reached when all prompts are read."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, *([activity.CUDA] if torch.cuda.is_available() else [])]
    sums: dict[str, float] = {}
    found = []
    for size, sign in zip(sizes, (1, -1)):
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            _, outputs = timed(llm, prompts, greedy(size, **sampling))
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        found.append((sign, rounds_of(outputs), [event for event in events if event.get("cat") == "kernel"]))
    rounds = found[0][1] - found[1][1]
    for sign, _, events in found:
        for name, microseconds in added(events):
            sums[name] = sums.get(name, 0.0) + sign * microseconds / 1e3 / rounds
    return sums


def added(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Of kernels that overlap, and end in the order they began, by how much each ended later than all before it; and
    when none ran."""
    now = -math.inf
    for event in sorted(events, key=lambda event: (event["ts"] + event["dur"], event["ts"])):
        end = event["ts"] + event["dur"]
        if now > -math.inf:
            yield IDLE, max(0.0, event["ts"] - now)
        now = max(now, event["ts"])
        yield f"{event['name']}, {math.prod(event['args'].get('grid', [1]))} programs", end - now
        now = end
