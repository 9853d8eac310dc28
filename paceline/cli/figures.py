"""What an answer took, counted while it comes, and how that stands against plain decoding in the same process.

Knows chunks and rounds. Must not know how figures are shown, nor who asked.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.stats import RoundRecord
    from paceline.llm import LLM
    from paceline.outputs import Chunk

ENOUGH = 4  # timed tokens below which a speed says nothing
ENOUGH_ROUNDS = 16  # without a draft, for a cost of plain decoding
PROBE = "The rider in front breaks the wind, and the riders behind rest in the draft."
PROBE_TOKENS, PROBE_SECONDS, WARM_UP = 24, 1.5, 3


class PlainCost:
    """Seconds that plain decoding takes per token: the median of the latest run with enough rounds without a draft.

    A few such rounds tell nothing: with a good drafter they are an answer's first ones, after a pause, and slow.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None

    def learn(self, records: Iterable[RoundRecord], least: int = ENOUGH_ROUNDS) -> None:
        plain = [one for one in records if one.proposed == 0 and one.rows == one.emitted == 1]
        if len(plain) >= least:
            self.seconds = statistics.median(one.verify_seconds + one.rest_seconds for one in plain)


def measure_plain(llm: LLM) -> PlainCost:
    """A short run of plain decoding. The drafter must be off, else it would learn from it."""
    from paceline.params import SamplingParams

    cost = PlainCost()
    ids = llm.tokenizer.encode(PROBE)[: llm.max_model_len - 1]
    params = SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True)
    start, before = time.perf_counter(), llm.engine.stats.rounds
    for _ in llm.stream({"prompt_token_ids": ids}, params):
        if time.perf_counter() - start > PROBE_SECONDS:
            break
    cost.learn(latest(llm, llm.engine.stats.rounds - before)[WARM_UP:], least=1)
    return cost


def latest(llm: LLM, count: int) -> list[RoundRecord]:
    """The engine's last `count` rounds, as far as it remembers."""
    return list(llm.engine.stats.recent)[-count:] if count else []


@dataclass
class Figures:
    """One answer, or the sum of several. Speeds leave out the prompt: the clock starts with the first token."""

    tokens: int = 0
    forwards: int = 0
    origins: Counter[str] = field(default_factory=Counter)  # a drafter's name, or what the target's own token was
    timed_tokens: int = 0
    seconds: float = 0.0  # of the timed tokens
    plain_seconds: float = 0.0  # that plain decoding would have taken for them
    wait: float = 0.0  # until the first token
    proposed: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    reused: int = 0  # of the prompt, from the cache

    def add(self, chunk: Chunk, elapsed: float) -> None:
        """A chunk that came `elapsed` seconds after the question."""
        if not chunk.token_ids:
            return
        self.forwards += 1
        self.origins.update(told.drafter or told.kind for told in chunk.provenance)
        if self.tokens:
            self.timed_tokens += len(chunk.token_ids)
            self.seconds = elapsed - self.wait
        else:
            self.wait = elapsed
        self.tokens += len(chunk.token_ids)

    def close(self, records: Iterable[RoundRecord], prompt_tokens: int, plain: PlainCost) -> None:
        """The rounds it took; those up to the first token computed what the cache did not hold of the prompt."""
        self.plain_seconds = self.timed_tokens * (plain.seconds or 0.0)
        computed, reading = 0, True
        for record in records:
            computed += record.rows - record.proposed if reading else 0
            reading = reading and record.emitted == 0
            self.proposed += record.proposed
            self.accepted += record.accepted
        self.prompt_tokens += prompt_tokens
        self.reused += max(0, prompt_tokens - computed)

    def include(self, other: Figures) -> None:
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.origins.update(other.origins)

    @property
    def speed(self) -> float | None:
        """Tokens per second; None while that says nothing."""
        return self.timed_tokens / self.seconds if self.timed_tokens >= ENOUGH and self.seconds > 0 else None

    @property
    def per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    def times_plain(self, plain: PlainCost) -> float | None:
        """Against what plain decoding cost when each answer was made; while one comes, against what it costs now."""
        if self.speed is None or plain.seconds is None:
            return None
        return self.plain_seconds / self.seconds if self.plain_seconds else self.speed * plain.seconds

    def line(self, plain: PlainCost, drafting: bool) -> str:
        """For people, in less than 80 columns."""
        said = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.speed is not None:
            said.append(f"{self.speed:.1f} tokens/s")
        said.append(f"{self.per_forward:.2f} per forward")
        times = self.times_plain(plain)
        if not drafting:
            said.append("plain")
        elif times is not None:
            said.append(f"≈ {times:.1f}× plain")
        return " · ".join(said)

    def report(self, plain: PlainCost) -> list[str]:
        """All of it, a line each."""
        times = self.times_plain(plain)
        speed = "–" if self.speed is None else f"{self.speed:.1f} tokens/s"
        rows = [
            (
                "answered",
                f"{self.tokens} tokens in {self.forwards} target forwards, {self.per_forward:.2f} per forward",
            ),
            ("speed", speed + ("" if times is None else f", ≈ {times:.1f}× plain")),
            ("plain", "–" if plain.seconds is None else f"≈ {1 / plain.seconds:.1f} tokens/s here"),
            ("tokens from", ", ".join(f"{name} {count}" for name, count in self.origins.most_common()) or "–"),
        ]
        if self.proposed:
            share = f"{self.accepted / self.proposed:.0%}"
            rows.append(("drafts", f"{self.accepted} of {self.proposed} drafted tokens accepted ({share})"))
        rows.append(("prompts", f"{self.prompt_tokens} tokens, {self.reused} of them from the cache"))
        return [f"{name:<12} {text}" for name, text in rows]


SUMMED = tuple(item.name for item in fields(Figures) if item.name != "origins")
