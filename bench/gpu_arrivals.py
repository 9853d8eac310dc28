"""Requests that arrive at random (Poisson), and when their tokens come: asked alike of any engine, and knows none."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

Told = list[tuple[float, int]]  # of one request: seconds since it was sent, and how many tokens came then


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which so many requests come, `rate` a second; the same every time."""
    chooser = random.Random(seed)
    return list(itertools.accumulate(chooser.expovariate(rate) for _ in range(count)))


async def ask(
    stream: Callable[[list[int]], AsyncIterator[int]], prompts: list[list[int]], due: list[float]
) -> dict[str, Any]:
    """Each prompt at its time. stream: yields how many tokens came, whenever some did. Of all: the seconds it took,
    the tokens, seconds to each first one, and between each two updates."""
    begun = time.perf_counter()

    async def one(prompt: list[int], at: float) -> Told:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - begun)))
        start = time.perf_counter()
        return [(time.perf_counter() - start, count) async for count in stream(prompt) if count]

    answers = await asyncio.gather(*map(one, prompts, due))
    return {
        "seconds": time.perf_counter() - begun,
        "tokens": sum(count for told in answers for _, count in told),
        "first": [told[0][0] for told in answers],
        "between": [later[0] - one[0] for told in answers for one, later in itertools.pairwise(told)],
    }
