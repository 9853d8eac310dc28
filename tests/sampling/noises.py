"""The noise stated in unbounded integers, and walks along the parts of its key."""

from __future__ import annotations

import math

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from paceline.sampling import noise
from paceline.sampling.noise import SAMPLE, Keys

ALPHA = 1e-6


WORD = 2**32


def scramble(x: int) -> int:
    x = (x ^ x // 2**16) * 0x7FEB352D % WORD
    x = (x ^ x // 2**15) * 0x846CA68B % WORD
    return x ^ x // 2**16


def stated_bits(seed: int, sample: int, position: int, stream: int, extra: int | None, token: int) -> int:
    """The hash in words: absorb the key's parts into two words from two starts, then the token between them."""
    seed %= 2**64
    parts = [seed % WORD, seed // WORD, sample, position, stream] + ([] if extra is None else [extra])
    words = []
    for word in (0x9E3779B9, 0x3C6EF372):
        for number, part in enumerate(parts, start=1):
            word = scramble(((word ^ part % WORD) + number * 0x85EBCA6B) % WORD)
        words.append(word)
    return scramble((scramble(token ^ words[0]) + words[1]) % WORD)


def stated_uniform(seed: int, sample: int, position: int, stream: int, extra: int | None, token: int = 0) -> float:
    return (stated_bits(seed, sample, position, stream, extra, token) + 0.5) / WORD


def keys_of(seeds: list[int], samples: list[int]) -> Keys:
    signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
    return Keys(torch.tensor(signed, dtype=torch.int64), torch.tensor(samples, dtype=torch.int64))


def unit_of(integers: Tensor) -> np.ndarray:
    return ((integers.double() + 0.5) / WORD).numpy()


COUNT = 32_000


WALKS = ["token", "position", "sample", "seed", "high half of the seed", "extra", "node"]


def walk_bits(part: str, stream: int = SAMPLE, shift: int = 0, **fixed: int) -> Tensor:
    """COUNT integers of 32 bits along one part of the key, all others fixed; `shift` starts later."""
    steps = torch.arange(shift, COUNT + shift)
    zeros = torch.zeros(COUNT, dtype=torch.int64)
    seeds = (
        steps if part == "seed" else steps << 32 if part == "high half of the seed" else zeros + fixed.get("seed", 1)
    )
    samples = steps if part == "sample" else zeros + fixed.get("sample", 0)
    positions = steps if part == "position" else zeros + fixed.get("position", 30)
    extra = steps if part == "extra" else 31 * 4096 + steps if part == "node" else zeros + fixed.get("extra", 31)
    tokens = steps[:, None] if part == "token" else zeros[:, None] + fixed.get("token", 0)
    return noise.bits(Keys(seeds, samples), positions, stream, tokens, extra)[:, 0]


def check_independent(one: np.ndarray, other: np.ndarray) -> None:
    """Two series of uniforms: a 16 × 16 table of both looks uniform, and no correlation (alpha 1e-6 each)."""
    table = np.histogram2d(one, other, bins=16, range=[[0, 1], [0, 1]])[0]
    value = scipy.stats.chisquare(table.ravel()).pvalue
    assert value > ALPHA, f"not independent: p = {value:.3g}"
    score = float(np.corrcoef(one, other)[0, 1] * math.sqrt(len(one)))
    assert 2 * scipy.stats.norm.sf(abs(score)) > ALPHA, f"correlated: {score:.1f} standard deviations"
