"""The part of gpu.py in which requests arrive at random: ours, and vLLM where it is there, asked at the same times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Iterator

import numpy as np
from gpu_arrivals import arrivals, ask
from gpu_common import Bench, Row, greedy, random_prompts
from gpu_peer import ask_vllm

from paceline import AsyncLLM

INPUT, OUTPUT = 2048, 300
CROWD = 256  # sequences that may run at the same time
SECONDS = 14.0  # for which requests arrive: about as long as an answer takes where half the rounds read prompts
BEFORE = 4  # more, asked before: whatever is made once is made then


def serving(bench: Bench) -> Iterator[Row]:
    """A row for each rate: ours one after the other, then vLLM's."""
    shape = bench.options.shapes[0]
    taken, new = (24, 8) if bench.quick else (INPUT, OUTPUT)
    rates = [20 * bench.options.rates[0]] if bench.quick else bench.options.rates
    length = taken + new + 64
    model = bench.shape(shape, length)
    options = {"load_format": "dummy", "max_model_len": length, "max_num_seqs": CROWD}
    runs = [{"name": "before", "due": [0.0] * BEFORE}]
    for rate in rates:
        count = 6 if bench.quick else min(bench.options.prompts, round(SECONDS * rate))
        runs.append({"name": f"{rate:g}", "due": arrivals(count, rate)})
    for number, run in enumerate(runs):
        run |= {"prompts": random_prompts(len(run["due"]), taken, 256 if bench.quick else 49152, number), "new": new}
    told = {
        f"{rate:g}": {"shape": shape, "rate": rate, "input": taken, "output": new, "requests": len(run["due"])}
        for rate, run in zip(rates, runs[1:])
    }
    with contextlib.closing(_ours(bench, model, options, runs)) as ours:  # before vLLM's begins
        for rate, found in zip([None, *rates], ours):
            if rate is not None:
                yield _row("paceline", told[f"{rate:g}"], found)
    if bench.options.peer_python:
        answered = ask_vllm(bench, {"model": model, **options, "seed": 0}, [], runs)
        for rate in rates:
            yield _row("vLLM", told[f"{rate:g}"], answered[f"{rate:g}"])


def _ours(bench: Bench, model: str, options: Row, runs: list[Row]) -> Generator[Row]:
    """What came of each run."""
    given = {"device": bench.options.device, "dtype": bench.options.dtype, "prefix_caching": False, "seed": 0}
    if bench.options.kernels:
        given["kernels"] = bench.options.kernels
    with asyncio.Runner() as loop:
        llm = AsyncLLM(model, **options, **given)
        try:
            for run in runs:
                yield loop.run(_ask(llm, run))
        finally:
            loop.run(llm.close())


async def _ask(llm: AsyncLLM, run: Row) -> Row:
    async def stream(prompt: list[int]) -> AsyncIterator[int]:
        async for chunk in llm.stream(prompt, greedy(run["new"])):
            yield len(chunk.token_ids)

    stats = llm.llm.engine.stats
    before = stats.rounds
    found = await ask(stream, run["prompts"], run["due"])
    records = list(stats.recent)[-(stats.rounds - before) :]
    return {**found, "rounds": len(records), "rounds_with_prompts": sum(record.nodes is None for record in records)}


def _row(who: str, told: Row, found: Row) -> Row:
    row = {"who": who, **told, "seconds": found["seconds"], "tokens_per_second": found["tokens"] / found["seconds"]}
    row |= {"ttft_ms": _spread(found["first"]), "itl_ms": _spread(found["between"])}
    row |= {name: found[name] for name in ("rounds", "rounds_with_prompts") if name in found}
    print(row, flush=True)
    return row


def _spread(seconds: list[float]) -> dict[str, float]:
    values = 1e3 * np.array(seconds)
    return {"mean": float(values.mean()), **{f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}}
