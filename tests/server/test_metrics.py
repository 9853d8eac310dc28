"""What is counted of updates as they pass, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.engine.sequence import Provenance
from paceline.engine.stats import SequenceStats
from paceline.engine.update import Update
from paceline.server.metrics import Metrics
from paceline.server.runtime import Figures


def make(drafter: str | None) -> tuple[Metrics, Any]:
    """The figures, and what stands in for the engine's process."""
    figures = Figures(2, 5, 30, 9, 0.5, 2.0, 0.25, 4.0, 1)
    ready = SimpleNamespace(drafter=drafter, num_pages=64)
    engine: Any = SimpleNamespace(ready=ready, figures=figures, num_restarts=0, num_samples=7)
    engine.is_under_way = lambda tag: False
    return Metrics(engine), engine


def ended(*accepted: tuple[str, int], stats: SequenceStats) -> Update:
    """The last update of an answer whose tokens came from these drafters, at these depths, and one from the target."""
    origins = [Provenance(name, "accepted", 0, depth) for name, depth in accepted]
    origins.append(Provenance(None, "corrected", 0, len(origins) + 1))
    tokens = list(range(len(origins)))
    return Update("1", 0, tokens, len(tokens), "", origins, None, 0, "stop", None, None, stats, None)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_drafters_that_are_asked_in_turn_are_counted_apart() -> None:
    metrics, _ = make("suffix then ngram")
    by = {"suffix": [3, 1], "ngram": [2]}
    metrics.take(ended(("suffix", 1), ("suffix", 2), ("ngram", 1), stats=SequenceStats(4, 7, [5, 1], [2, 1], by)))
    for name, depth, drafted, accepted in (("suffix", "1", 3, 1), ("suffix", "2", 1, 1), ("ngram", "1", 2, 1)):
        assert value(metrics, "paceline_drafted_tokens_total", drafter=name, position=depth) == drafted
        assert value(metrics, "paceline_accepted_tokens_total", drafter=name, position=depth) == accepted
    assert value(metrics, "paceline_drafted_tokens_total", drafter="suffix then ngram", position="1") is None
    assert metrics.summary()["drafted_by_position"] == [5, 1]


def test_one_drafter_has_its_own_name() -> None:
    metrics, _ = make("ngram")
    metrics.take(ended(("ngram", 1), stats=SequenceStats(2, 3, [2, 2], [1, 0])))
    assert value(metrics, "paceline_drafted_tokens_total", drafter="ngram", position="2") == 2
    assert value(metrics, "paceline_output_tokens_total", origin="ngram") == 1
    assert value(metrics, "paceline_output_tokens_total", origin="corrected") == 1


def test_the_queue_is_told_as_it_is_and_as_it_was_waited_in() -> None:
    metrics, engine = make(None)
    engine.on_enter(0.02)
    engine.on_enter(3.0)
    assert value(metrics, "paceline_requests_waiting") == 5 and value(metrics, "paceline_requests_running") == 2
    assert value(metrics, "paceline_answers_under_way") == 7
    assert value(metrics, "paceline_queue_seconds_count") == 2
    assert value(metrics, "paceline_queue_seconds_bucket", le="0.025") == 1
    assert value(metrics, "paceline_saved_seconds") == 4.0 - 2.75
