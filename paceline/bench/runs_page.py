"""Runs of any kind, one or several side by side, as one HTML page that needs nothing else: no network, no script.

Reads what `runs` reads and says what goes where; `runs.html` beside this file draws it. Writes no file.
"""

from __future__ import annotations

from typing import Any

from paceline.bench import page, report
from paceline.bench.charts import Series, plot, ticks
from paceline.bench.runs import Row, by_case, cells, columns, read_rows

Data = dict[str, Any]
MOST_LINES = 6  # of a plot; there are no more looks
TIMES = {"ttft": "To the first token", "tpot": "For each further token", "e2el": "For the whole answer"}


def render(runs: dict[str, Data]) -> str:
    """Runs by what they are called; a single one need not be told from others."""
    rows = [row for name, data in runs.items() for row in read_rows(data, name)]
    several = len(runs) > 1
    return page.fill(
        "runs.html",
        title=_title(runs),
        asked=[_about(name, data) for name, data in runs.items()],
        bars=[{"case": case, **_bars(found, several)} for case, found in by_case(rows).items()],
        acceptance=[
            {"case": case, "plot": drawn}
            for case, found in by_case(rows).items()
            if (drawn := _acceptance(found, several)) is not None
        ],
        times=[{"title": title, "plot": drawn} for name, title in TIMES.items() if (drawn := _times(runs, name))],
        table=_table(rows, several),
        several=several,
    )


def _title(runs: dict[str, Data]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs side by side"
    ((_, data),) = runs.items()
    if data["kind"] == "serve":
        return f"{data['server']['model']}, served"
    return f"{data['options']['model'].rpartition('/')[2]}: plain decoding, drafters and peers by dataset"


def _about(name: str, data: Data) -> Data:
    where = page.where(data["machine"])
    notes = [f"{peer}: {why}" for peer, why in data.get("absent", {}).items()]
    refused = data.get("server", {}).get("left_out")
    if refused:
        notes.append(f"the server refused {' and '.join(refused)}; it was asked without")
    return {"name": name, "data": data, "where": where, "notes": notes}


def _label(row: Row, several: bool) -> str:
    return f"{row.run}: {row.name}" if several else row.name


def _bars(rows: list[Row], several: bool) -> Data:
    """A bar a row: tokens a second."""
    scale = ticks(max(*(row.get("tokens_per_second") for row in rows), 1e-9))
    most = scale[-1]
    return {
        "one": None,
        "ticks": [(round(100 * tick / most, 2), f"{tick:g}") for tick in scale],
        "rows": [
            {
                "label": _label(row, several),
                "look": 0 if row.name == "plain" else 1 + place % page.NUM_LOOKS,
                "value": f"{row.get('tokens_per_second'):.1f} tokens/s",
                "bounds": None,
                "rate": "" if row.get("speed_up") is None or row.name == "plain" else _gain(row),
                "width": round(100 * row.get("tokens_per_second") / most, 2),
                "ends": None,
            }
            for place, row in enumerate(rows)
        ],
    }


def _gain(row: Row) -> str:
    ends = row.get("speed_up_interval")
    return f"{row.get('speed_up'):.2f}× plain" + (f" ({report.bounds(ends)})" if ends else "")


def _acceptance(rows: list[Row], several: bool) -> Data | None:
    drafted = [row for row in rows if row.get("acceptance_by_position")][:MOST_LINES]
    series = [
        Series(
            _label(row, several),
            1 + place,
            [(float(at), 100 * one) for at, one in enumerate(row.get("acceptance_by_position"), 1)],
            form="{:.0f}%",
        )
        for place, row in enumerate(drafted)
    ]
    return plot(series, [0, 20, 40, 60, 80, 100], "{:g}%") if series else None


def _times(runs: dict[str, Data], name: str) -> Data | None:
    """Of servers: a metric's percentiles, a line a run."""
    series: list[Series] = []
    for run, data in list(runs.items())[:MOST_LINES]:
        found = data.get("figures", {}) if data["kind"] == "serve" else {}
        points = sorted(
            (float(key[1:].partition("_")[0]), float(value))
            for key, value in found.items()
            if key.startswith("p") and key.endswith(f"_{name}_ms") and value is not None
        )
        if points:
            series.append(Series(run, 1 + len(series), points, form="{:.0f}"))
    highest = max((y for one in series for _, y in one.points), default=None)
    return None if highest is None else plot(series, ticks(max(highest, 1e-3)), "{:g}")


def _table(rows: list[Row], several: bool) -> Data:
    shown = columns(rows)
    return {
        "heads": ["run", *(head for head, _ in shown.values())],
        "rows": [{"name": _label(row, several), "case": row.case, "cells": cells(row, shown)} for row in rows],
    }
