"""The Grafana dashboard asks for figures that /metrics has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.sequence import Provenance
from paceline.engine.stats import SequenceStats
from paceline.engine.update import Update
from paceline.requests import Limits
from paceline.server.engine import EngineProcess
from paceline.server.metrics import Metrics
from paceline.server.runtime import Figures, Ready

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def panels() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return listed


def asked() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]


def told() -> dict[str, set[str]]:
    """The labels of every name that /metrics has after an answer."""
    engine = EngineProcess(lambda: None)
    engine.ready = Ready(Limits(97, 200), "ngram", 4, 10, 16)
    engine.figures = Figures(1, 1, 1, 1, 1.0, 1.0, 1.0, 2.0, 0)
    metrics = Metrics(engine)
    metrics.begun("0", 3)
    origins = [Provenance("ngram", "accepted", 0, 1), Provenance(None, "corrected", 0, 2)]
    stats = SequenceStats(rounds=1, tokens=2, proposed=[1], accepted=[1])
    metrics.take(Update("0", 0, [5, 6], 2, "", origins, None, 0, "length", stats=stats))
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    return dict(labels)


def test_every_figure_the_dashboard_asks_for_is_there() -> None:
    names = {name for expression in asked() for name in re.findall(r"\bpaceline_\w+", expression)}
    assert len(names) > 15 and names <= told().keys()


def test_every_label_the_dashboard_groups_by_is_there() -> None:
    labels, grouped = told(), 0
    for expression in asked():
        for by, name in re.findall(r"sum by \((\w+)\) \(\w+\((paceline_\w+)", expression):
            grouped += 1
            assert by in labels[name], expression
    assert grouped > 5


def test_the_dashboard_has_panels_of_speculation_that_do_not_overlap() -> None:
    titles = [panel["title"] for panel in panels()]
    assert titles[0] == "Speculation" and titles.index("Requests") > 3
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
