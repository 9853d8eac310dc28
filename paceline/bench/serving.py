"""Requests sent to a server as they would come in: at a rate, or as many as may run at once; and what came of them.

Knows arrivals and figures. How a request is sent is `client`'s, what is asked `asks`'. Prints nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from paceline.bench.client import Ask, Reply, Server, clock, read_counters, send
from paceline.engine.stats import add_by_position
from paceline.errors import OptionError

METRICS = ("ttft", "tpot", "itl", "e2el")  # to the first token, per further token, between pieces, the whole
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class Load:
    """How requests come. rate: of them in a second, on average; burstiness 1 is Poisson's, below it they cluster."""

    asks: list[Ask]
    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise OptionError(f"request_rate={self.rate} is not allowed; allowed: above 0, or inf")
        if not 0 < self.burstiness < math.inf:
            raise OptionError(f"burstiness={self.burstiness} is not allowed; allowed: above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise OptionError(f"max_concurrency={self.max_concurrency} is not allowed; allowed: 1 or more")

    def arrivals(self) -> list[float]:
        """Seconds from the beginning, one for each request."""
        if math.isinf(self.rate):
            return [0.0] * len(self.asks)
        draws = np.random.default_rng(self.seed)
        gaps = draws.gamma(self.burstiness, 1 / (self.rate * self.burstiness), size=len(self.asks))
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]


@dataclass
class Run:
    """What was measured. Interrupted, it holds the answers that had ended."""

    replies: list[Reply] = field(default_factory=list)
    seconds: float = 0.0
    most_at_once: int = 0
    interrupted: bool = False
    counters: dict[str, float] = field(default_factory=dict)  # of the server's /metrics: what the run added


Tell = Callable[[int, int], None]  # requests that ended, requests under way


async def drive(client: httpx.AsyncClient, server: Server, load: Load, tell: Tell = lambda ended, running: None) -> Run:
    """Send all of it and wait for every answer. A cancellation (Ctrl-C) ends it with what has ended."""
    run, running = Run(), 0
    before = await read_counters(client)
    gate = contextlib.nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    begun = clock()

    async def one(ask: Ask, at: float) -> None:
        nonlocal running
        await asyncio.sleep(max(0.0, at - (clock() - begun)))
        async with gate:
            running += 1
            run.most_at_once = max(run.most_at_once, running)
            start = clock() - begun
            try:
                reply = await send(client, server, ask)
            finally:
                running -= 1
        reply.start = start
        run.replies.append(reply)
        tell(len(run.replies), running)

    tasks = [asyncio.ensure_future(one(ask, at)) for ask, at in zip(load.asks, load.arrivals())]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.interrupted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    run.seconds = clock() - begun
    run.replies.sort(key=lambda reply: reply.start)
    after = await read_counters(client)
    run.counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return run


# Figures


def count_tokens(reply: Reply) -> int:
    """As the server counts them; where it does not, a piece is a token."""
    told = (reply.usage or {}).get("completion_tokens")
    return told if isinstance(told, int) and told > 0 else reply.num_pieces


def figures(run: Run, percentiles: tuple[float, ...] = PERCENTILES) -> dict[str, Any]:
    """By the names of vLLM's benchmark; times of the four metrics in milliseconds."""
    good = [reply for reply in run.replies if reply.error is None]
    counted = [(reply.usage or {}).get("prompt_tokens") or reply.ask.prompt_tokens for reply in good]
    inputs = None if None in counted else sum(filter(None, counted))  # None: neither the server nor we could count
    outputs = sum(map(count_tokens, good))
    seconds = run.seconds or math.nan
    told: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(good),
        "failed": len(run.replies) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": None if inputs is None else (inputs + outputs) / seconds,
        "max_concurrent_requests": run.most_at_once,
    }
    for name, values in _times(good).items():
        told |= _summary(name, values, percentiles)
    return told


def _times(good: list[Reply]) -> dict[str, list[float]]:
    several = [(reply, count_tokens(reply)) for reply in good]
    return {
        "ttft": [reply.first or 0.0 for reply in good],
        "tpot": [(reply.seconds - (reply.first or 0.0)) / (tokens - 1) for reply, tokens in several if tokens > 1],
        "itl": [gap for reply in good for gap in reply.gaps],
        "e2el": [reply.seconds for reply in good],
    }


def _summary(name: str, values: list[float], percentiles: tuple[float, ...]) -> dict[str, float | None]:
    found = np.array(values) * 1000
    told: dict[str, float | None] = {}
    for what, figure in (("mean", np.mean), ("median", np.median), ("std", np.std)):
        told[f"{what}_{name}_ms"] = float(figure(found)) if values else None
    for share in percentiles:
        told[f"p{share:g}_{name}_ms"] = float(np.percentile(found, share)) if values else None
    return told


def acceptance(run: Run) -> dict[str, Any] | None:
    """Drafts and what became of them: as the answers' usage tells it, else as the server counted meanwhile."""
    told = [(reply.usage or {}).get("speculation") for reply in run.replies if reply.error is None]
    found = [one for one in told if isinstance(one, dict)]
    if found:
        drafted, accepted = (
            add_by_position(one.get(f"{name}_by_position") or [] for one in found) for name in ("drafted", "accepted")
        )
        tokens = sum(count_tokens(reply) for reply in run.replies if reply.error is None)
        forwards = sum(one.get("target_forwards") or 0 for one in found)
        return _acceptance("usage", drafted, accepted, tokens / forwards if forwards else None)
    if not run.counters.get("drafted"):
        return None
    drafted, accepted = (list(_counted(run.counters, name)) for name in ("drafted", "accepted"))
    data = _acceptance("/metrics", drafted, accepted, None)
    data |= {"drafted": int(run.counters["drafted"]), "accepted": int(run.counters.get("accepted", 0))}
    return data | {"acceptance": data["accepted"] / data["drafted"]}


def _acceptance(source: str, drafted: list[int], accepted: list[int], per_forward: float | None) -> dict[str, Any]:
    total = sum(drafted)
    return {
        "source": source,
        "drafted": total,
        "accepted": sum(accepted),
        "acceptance": sum(accepted) / total if total else None,
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
        "tokens_per_forward": per_forward,
    }


def _counted(counters: dict[str, float], name: str) -> Iterator[int]:
    place = 1
    while f"{name}.{place}" in counters:
        yield int(counters[f"{name}.{place}"])
        place += 1
