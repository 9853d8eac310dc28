"""The parts of gpu.py that compare: drafters with plain decoding, exact kernels with fast ones, long texts, a peer."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import (
    BATCHES,
    FASTEST,
    PROMPT,
    Bench,
    Row,
    asking,
    greedy,
    per_round,
    per_rounds,
    random_prompts,
    synchronize,
    timed,
)
from gpu_peer import FIRST, export
from gpu_profile import kernels_of

from paceline import LLM, NGram, Suffix
from paceline.bench import peers
from paceline.bench.interval import Cost, estimate
from paceline.models import loader

HEAD_REACH = {1: 2.0, 16: 1.5, 64: 1.0, 256: 1.0}  # times as fast as plain
LOOKUP_REACH = 0.97
LONG_REACH = 1.5  # times the time to read the cache
LONG_CONTEXT = 32768
COST_REACH = 0.05  # of the fastest kernels' time that exact ones may cost


def head(bench: Bench) -> Iterator[Row]:
    """The head against plain decoding on MT-bench's first turns, greedy and sampled, in turns."""
    for batch in bench.batches(*HEAD_REACH):
        with _sides(bench, bench.options.small, batch, bench.heads()) as sides:
            texts = [] if sides["plain"].tokenizer is None else bench.texts("mt_bench.jsonl")
            for temperature in (0.0, 0.8):
                found = _race(bench, sides, texts, batch, bench.options.answer, temperature)
                yield from ({**row, "reach": HEAD_REACH.get(batch, 1.0)} for row in found)


def lookup(bench: Bench) -> Iterator[Row]:
    """N-gram and suffix against plain decoding, by kind of prompt. Suffix knows no answers but its own."""
    asked = {
        "summarisation": (("spec_bench.jsonl",), ("summarization",)),
        "retrieval": (("spec_bench.jsonl",), ("rag",)),
        "HumanEval": (("humaneval.jsonl.gz",), ()),
    }
    for model, batch in itertools.product(bench.models, bench.batches(1, 8, 64)):
        drafters = {"ngram": NGram(), "suffix": Suffix(max_cached_requests=0)}
        with _sides(bench, model, batch, drafters) as sides:
            for kind, (files, category) in asked.items():
                texts = [] if sides["plain"].tokenizer is None else bench.texts(*files, category=category)
                found = _race(bench, sides, texts, batch, bench.options.tokens, 0.0)
                yield from ({**row, "prompts_of": kind, "reach": LOOKUP_REACH} for row in found)


@contextlib.contextmanager
def _sides(bench: Bench, model: str, batch: int, drafters: dict[str, Any]) -> Iterator[dict[str, LLM]]:
    """An engine for plain decoding and one for each drafter: nothing is made anew between two turns."""
    length = 128 if bench.quick else 2048
    fixed = {"max_model_len": length, "max_num_seqs": batch, "num_pages": batch * (length // 16 + 1)}
    with contextlib.ExitStack() as stack:
        everyone = {"plain": None, **drafters}.items()
        yield {name: stack.enter_context(bench.llm(model, drafter, **fixed)) for name, drafter in everyone}


def _race(
    bench: Bench, sides: dict[str, LLM], texts: list[Any], batch: int, new: int, temperature: float
) -> list[dict[str, Any]]:
    """All sides take turns at the same batches of prompts; the first turn is not counted."""
    plain = sides["plain"]
    new = 12 if bench.quick else new
    count = max(batch, min(bench.options.prompts, len(texts) or batch, 4 * batch if batch > 8 else 16))
    prompts = asking(plain, texts, count, new)
    params = [greedy(new, temperature=temperature, seed=number, ignore_eos=False) for number in range(count)]
    spent: dict[str, list[float]] = {name: [] for name in sides}
    said: dict[str, list[list[int]]] = {}
    rounds: dict[str, int] = {}
    chosen: dict[str, dict[str, int]] = {}
    for turn in range(1 + bench.options.turns):
        for name, llm in sides.items():
            before = llm.engine.stats.rounds
            seconds, outputs = timed(llm, prompts, params)
            chosen[name] = _chosen(llm, before)
            said[name] = [output.outputs[0].token_ids for output in outputs]
            rounds[name] = sum(output.outputs[0].stats.rounds for output in outputs)
            if turn:
                spent[name].append(seconds)
    tokens = sum(map(len, said["plain"]))
    costs = {
        name: Cost(np.array(taken)[:, None], np.full((len(taken), 1), float(sum(map(len, said[name])))))
        for name, taken in spent.items()
    }
    rows = []
    for name, taken in spent.items():
        found = estimate(costs["plain"], costs[name])
        rows.append(
            {
                "model": _name(plain),
                "drafter": name,
                "batch": batch,
                "temperature": temperature,
                "prompts": count,
                "tokens": tokens,
                "seconds": taken,
                "tokens_per_second": sum(map(len, said[name])) / statistics.median(taken),
                "tokens_per_forward": sum(map(len, said[name])) / rounds[name],
                "rounds_by_nodes": chosen[name],
                "speed_up": found.value,
                "speed_up_interval": None if found.low is None else [found.low, found.high],
                "identical": sum(a == b for a, b in zip(said[name], said["plain"])),
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "seconds"}, flush=True)
    return rows[1:]


def _chosen(llm: LLM, before: int) -> dict[str, int]:
    """How many of the rounds of decoding alone, since there were so many, might have how many nodes."""
    stats = llm.engine.stats
    records = list(stats.recent)[-(stats.rounds - before) :]
    counts = Counter(record.nodes for record in records if record.nodes is not None)
    return {str(nodes): count for nodes, count in sorted(counts.items())}


def _name(llm: LLM) -> str:
    return Path(llm.engine.target.origin).name


def fast(bench: Bench) -> Iterator[Row]:
    """What exact kernels cost: two engines take turns at steps, and at a prompt's first token."""
    for shape in bench.options.shapes:
        batches = bench.batches(*BATCHES)
        given = {"max_num_seqs": max(batches), "num_pages": max(batches) * 48 + 256, "max_model_len": FIRST + 64}
        with bench.dummy(shape, **given) as exact, bench.dummy(shape, **given, **FASTEST) as fastest:
            sides, vocabulary = [exact, fastest], exact.config.vocab_size
            asked = random_prompts(1, 32 if bench.quick else FIRST, vocabulary)
            taken = [math.inf, math.inf]
            for turn in range(1 + 2 * bench.options.turns):
                for number, llm in enumerate(sides):
                    seconds, _ = timed(llm, asked, greedy(1))
                    taken[number] = min(taken[number], seconds) if turn else math.inf
            yield _cost(shape, f"first token of {len(asked[0])}", 1, [1e3 * seconds for seconds in taken])
            for batch in batches:
                prompts = random_prompts(batch, 16 if bench.quick else PROMPT, vocabulary)
                found = per_rounds(sides, prompts, bench.options.turns, bench.quick)
                yield _cost(shape, "a step", batch, [one["ms"] for one in found])


def _cost(shape: str, what: str, batch: int, times: list[float]) -> Row:
    exact, fastest = times
    row = {"shape": shape, "what": what, "batch": batch, "exact_ms": exact, "fast_ms": fastest}
    row |= {"cost": exact / fastest - 1, "reach": COST_REACH}
    print(row, flush=True)
    return row


def long(bench: Bench) -> Iterator[Row]:
    """A step after a long text: its attention's kernels, and by how much it is longer than one after a short text."""
    shape = bench.options.shapes[0]
    far = 256 if bench.quick else LONG_CONTEXT
    llm = bench.dummy(shape, max_model_len=far + 256, max_num_seqs=1, prefix_caching=True)  # texts are read once
    model = llm.engine.target.model
    row_bytes = sum(spec.row_bytes for spec in model.layer_specs(llm.engine.target.dtype))
    bandwidth = _bandwidth(bench)
    short = 32 if bench.quick else 512
    asked = {size: random_prompts(1, size, llm.config.vocab_size) for size in (short, far)}
    found = {size: per_round(llm, asked[size], bench.options.turns, bench.quick)["ms"] for size in asked}
    kernels = kernels_of(llm, asked[far], (24, 8) if bench.quick else (96, 64))
    spent = sum(ms for name, ms in kernels.items() if name.startswith("look,"))
    reading, longer = 1e3 * row_bytes * far / bandwidth, found[far] - found[short]
    row = {
        "shape": shape,
        "context": far,
        "step_ms": found[far],
        "short_context": short,
        "short_step_ms": found[short],
        "attention_ms": spent,
        "longer_ms": longer,
        "longer_ratio": longer / (reading * (far - short) / far),
        "cache_read_ms": reading,
        "ratio": spent / reading,
        "reach": LONG_REACH,
        "bytes_per_second": bandwidth,
    }
    print(row, flush=True)
    llm.close()
    yield row


def _bandwidth(bench: Bench) -> float:
    """Bytes a second that a copy reads and writes."""
    size = 2**20 if bench.quick else 2**31
    source = torch.ones(size, dtype=torch.uint8, device=bench.options.device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size / best


def transformers(bench: Bench) -> Iterator[Row]:
    """transformers' plain, prompt lookup and assisted generation beside ours, one prompt at a time."""
    options, new = bench.options, 12 if bench.quick else bench.options.tokens
    name, path = loader.locate(options.small).name, bench.folder / "exported"
    export(options.small, path)  # they read no GGUF file without another package
    draft = path if options.draft is None else loader.locate(options.draft)
    asked = peers.Asked(path, draft, 2048, torch.device(options.device), torch.get_num_threads())
    found, absent = peers.find_peers(asked)
    spent: dict[str, tuple[float, int]] = {}  # seconds and tokens
    with _sides(bench, options.small, 1, {"ngram": NGram()}) as sides:
        texts = [] if sides["plain"].tokenizer is None else bench.texts("mt_bench.jsonl")
        prompts = asking(sides["plain"], texts, 2 if bench.quick else 8, new)
        for side, llm in sides.items():
            timed(llm, prompts[:1], greedy(new))
            seconds = sum(timed(llm, [prompt], greedy(new))[0] for prompt in prompts)
            spent[f"paceline, {side}"] = seconds, new * len(prompts)
        for peer in (peer for peer in found if peer.name.startswith("transformers")):
            peer.answer(prompts[0], 4, [])
            synchronize()
            begin = time.perf_counter()
            tokens = sum(len(peer.answer(prompt, new, [])) for prompt in prompts)
            synchronize()
            spent[peer.name] = time.perf_counter() - begin, tokens
    ours = spent["paceline, plain"][1] / spent["paceline, plain"][0]
    for who, (seconds, tokens) in spent.items():
        row = {"who": who, "seconds": seconds, "tokens_per_second": tokens / seconds, "prompts": len(prompts)}
        row["ratio"] = ours / row["tokens_per_second"]
        print(row, flush=True)
        yield {"model": name, **row, "absent": absent}
