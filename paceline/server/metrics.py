"""Figures for Prometheus and the page: counted from updates as they pass, and from what the engine tells of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.engine.stats import SequenceStats, add_by_position
from paceline.engine.update import Update
from paceline.server.engine import EngineProcess

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass
class Begun:
    """A request under way."""

    at: float
    first: float | None = None  # when its first token came
    last: float = 0.0
    tokens: int = 0


class Metrics:
    media_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._begun: dict[str, Begun] = {}
        self._ended = SequenceStats()  # of all answers that ended: drafts proposed and accepted, by position
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("paceline_requests", "Answers that ended.", ["reason"], registry=registry)
        self.prompt_tokens = Counter("paceline_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.output_tokens = Counter("paceline_output_tokens", "Tokens of answers.", ["origin"], registry=registry)
        self.cached_tokens = Counter(
            "paceline_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.forwards = Counter(
            "paceline_target_forwards", "Target forwards that could commit tokens.", registry=registry
        )
        self.drafted = Counter(
            "paceline_drafted_tokens", "Drafts by position.", ["drafter", "position"], registry=registry
        )
        self.accepted = Counter(
            "paceline_accepted_tokens", "Accepted drafts by position.", ["drafter", "position"], registry=registry
        )
        self.first_token = Histogram(
            "paceline_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=LONG,
            registry=registry,
        )
        self.per_token = Histogram(
            "paceline_time_per_output_token_seconds",
            "Of the tokens behind the first.",
            buckets=SHORT,
            registry=registry,
        )
        self.queued = Histogram(
            "paceline_queue_seconds", "From the request to its first round.", buckets=LONG, registry=registry
        )
        registry.register(self)  # what the engine tells of itself
        engine.on_update, engine.on_enter, engine.on_leave = self.take, self.queued.observe, self.left

    def begun(self, tag: str, prompt_tokens: int) -> None:
        self._begun[tag] = Begun(time.monotonic())
        self.prompt_tokens.inc(prompt_tokens)

    def take(self, update: Update) -> None:
        """An update on its way to its client."""
        now, begun = time.monotonic(), self._begun.get(update.request_id)
        for one in update.provenance:
            self.output_tokens.labels(one.drafter or one.kind).inc()
            if one.kind == "accepted":
                self.accepted.labels(one.drafter, one.depth).inc()
        self.forwards.inc(bool(update.tokens))  # an update with tokens is a round of one sequence
        if begun is not None and update.tokens:
            if begun.first is None:
                begun.first = now
                self.first_token.observe(now - begun.at)
            begun.last, begun.tokens = now, begun.tokens + len(update.tokens)
        if update.stats is not None:
            self._end(update, begun)

    def _end(self, update: Update, begun: Begun | None) -> None:
        stats = update.stats
        assert stats is not None
        self.requests.labels(update.finish_reason).inc()
        self.cached_tokens.inc(stats.prefix_hit)
        ready = self._engine.ready
        name = ready.drafter if ready is not None and ready.drafter is not None else "none"
        self._ended.proposed = add_by_position([self._ended.proposed, stats.proposed])
        self._ended.accepted = add_by_position([self._ended.accepted, stats.accepted])
        for drafter, proposed in (stats.proposed_by or {name: stats.proposed}).items():
            for depth, count in enumerate(proposed, 1):
                self.drafted.labels(drafter, depth).inc(count)
        if begun is not None:
            if begun.first is not None and begun.tokens > 1:
                self.per_token.observe((begun.last - begun.first) / (begun.tokens - 1))
            if not self._engine.is_under_way(update.request_id):
                self._begun.pop(update.request_id, None)

    def left(self, tag: str) -> None:
        """A request that nobody waits for."""
        self._begun.pop(tag, None)

    def collect(self) -> Iterator[Metric]:
        """The engine's own, as Prometheus asks for them."""
        engine = self._engine
        yield _gauge("paceline_up", "Whether the engine can answer.", int(engine.ready is not None))
        yield _count("paceline_engine_restarts", "How often the engine was started again.", engine.num_restarts)
        yield _gauge("paceline_answers_under_way", "Answers asked for and not ended.", engine.num_samples)
        figures, ready = engine.figures, engine.ready
        if figures is None or ready is None:
            return
        yield _gauge("paceline_requests_running", "Sequences with a slot.", figures.running)
        yield _gauge("paceline_requests_waiting", "Sequences that wait for one.", figures.waiting)
        yield _gauge("paceline_pages_used", "Pages of cache in use.", figures.pages_used)
        yield _gauge("paceline_pages", "Pages of cache.", ready.num_pages)
        yield _count("paceline_preemptions", "Sequences that gave their pages back.", figures.preemptions)
        yield _count("paceline_rounds", "Rounds of the engine.", figures.rounds)
        for name in ("draft", "verify", "rest"):
            told = "host" if name == "rest" else name
            yield _count(f"paceline_{told}_seconds", f"Seconds of rounds: {told}.", getattr(figures, f"{name}_seconds"))
        spent = figures.draft_seconds + figures.verify_seconds + figures.rest_seconds
        saved = figures.plain_seconds - spent
        yield _gauge(
            "paceline_plain_seconds", "What plain rounds would have taken, as estimated.", figures.plain_seconds
        )
        yield _gauge("paceline_saved_seconds", "Of these, how many were saved.", saved)
        forwards, tokens = _value(self.forwards), sum(_values(self.output_tokens).values())
        yield _gauge(
            "paceline_tokens_per_forward", "Tokens of answers for each target forward.", tokens / (forwards or 1)
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def summary(self) -> dict[str, Any]:
        """The same for the page, as it draws them."""
        engine, figures = self._engine, self._engine.figures
        spent = 0.0 if figures is None else figures.draft_seconds + figures.verify_seconds + figures.rest_seconds
        return {
            "ready": engine.ready is not None,
            "drafter": None if engine.ready is None else engine.ready.drafter,
            "running": 0 if figures is None else figures.running,
            "waiting": 0 if figures is None else figures.waiting,
            "accepted_by_position": self._ended.accepted,  # of answers that ended, as drafts are told at the end
            "drafted_by_position": self._ended.proposed,
            "tokens": sum(_values(self.output_tokens).values()),
            "forwards": _value(self.forwards),
            "spent_seconds": spent,
            "plain_seconds": 0.0 if figures is None else figures.plain_seconds,
        }


def _gauge(name: str, told: str, value: float) -> Metric:
    return GaugeMetricFamily(name, told, value=value)


def _count(name: str, told: str, value: float) -> Metric:
    return CounterMetricFamily(name, told, value=value)


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """A counter's values by its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def _value(counter: Counter) -> float:
    return sum(_values(counter).values())
