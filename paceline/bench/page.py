"""A measurement as one HTML page, and a comparison as one picture (SVG). Both need nothing else: no network, no script.

Reads the layout of `results` alone and says what goes where; `page.html` and `picture.svg` beside this file draw it.
Measures nothing, writes no file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.bench import report
from paceline.bench.charts import Series, plot, ticks
from paceline.pieces import MEANINGS

Data = dict[str, Any]
FEW = 10  # a share of fewer drafts than these says little
NUM_LOOKS = 6  # colours and markers; further series begin again


def render(data: Data) -> str:
    """The page."""
    swept = data["kind"] == "sweep"
    return _fill(
        "page.html",
        data,
        verdict=report.verdict(data),
        bars=None if swept else _bars(data),
        lengths=_lengths(data) if swept else None,
        times=_times(data),
        table=_table(data),
        notes=report.footnotes(data),
        meanings=MEANINGS,
    )


def draw(data: Data) -> str:
    """The picture of a comparison: speed, and acceptance by position in the draft."""
    return _fill("picture.svg", data, bars=_bars(data))


def _fill(template: str, data: Data, **parts: Any) -> str:
    shared = {"title": _title(data), "asked": asked(data), "where": where(data["machine"])}
    return fill(template, data=data, **shared, acceptance=_acceptance(data), **parts)


def fill(template: str, **parts: Any) -> str:
    """A template of this folder with what stands in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    look: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, **look).get_template(template).render(**parts).lstrip()


def _title(data: Data) -> str:
    model = Path(data["options"]["model"]).name
    if data["kind"] == "sweep":
        return f"{model}: how long should drafts be?"
    return f"{model}: plain decoding and {report.count(len(data['variants']) - 1, 'drafter')}"


def asked(data: Data) -> str:
    """What was measured."""
    options, rows = data["options"], data["variants"]
    rounds = max(len(row["seconds"]) for row in rows)
    said = ""
    if data["kind"] == "sweep" and len(rows) > 1:
        said = "Drafter " + re.sub(r"[,:]num_draft_tokens=\d+$", "", rows[1]["name"]) + "; "
    said += f"{report.count(len(data['prompts']), 'prompt')}, at most {options['max_tokens']} tokens each, "
    said += f"{options['batch_size']} at a time, temperature {options['temperature']:g}, "
    return said + ("measured once" if rounds == 1 else f"median of {rounds} interleaved rounds")


def where(machine: Data) -> str:
    """On what."""
    parts = (
        machine["gpu"],
        machine["cpu"],
        f"{machine['cores']} cores, {machine['threads']} threads",
        machine["system"],
    )
    return ", ".join(str(part) for part in parts if part)


def _look(place: int) -> int:
    """Plain decoding is 0; drafters take turns with the others."""
    return 0 if place == 0 else 1 + (place - 1) % NUM_LOOKS


# Plots


def _bars(data: Data) -> Data:
    """A bar a variant: how many times as fast as plain."""
    rows = data["variants"]
    highest = max(max(row["speed_up"], *(row["speed_up_interval"] or [0])) for row in rows)
    scale = ticks(max(highest, 1.0))
    most = scale[-1]
    return {
        "ticks": [(round(100 * tick / most, 2), f"{tick:g}×") for tick in scale],
        "one": round(100 / most, 2),
        "rows": [
            {
                "label": row["label"],
                "look": _look(place),
                "value": f"{row['speed_up']:.2f}×",
                "bounds": None if row["speed_up_interval"] is None else report.bounds(row["speed_up_interval"]),
                "rate": f"{row['tokens_per_second']:.1f} tokens/s",
                "width": round(100 * row["speed_up"] / most, 2),
                "ends": row["speed_up_interval"] and [round(100 * end / most, 2) for end in row["speed_up_interval"]],
            }
            for place, row in enumerate(rows)
        ],
    }


def _lengths(data: Data) -> Data | None:
    """Speed-up by draft length: in forwards of the target, and in time."""
    rows = [row for row in data["variants"] if row["draft_length"] is not None]
    if not rows:
        return None
    series = []
    for name, label, look in (("forward_speed_up", "in forwards of the target", 2), ("speed_up", "in time", 1)):
        points = [(float(row["draft_length"]), float(row[name])) for row in rows]
        bounds = [row[f"{name}_interval"] for row in rows] if name == "speed_up" else []
        series.append(Series(label, look, points, bounds))
    numbers = [y for one in series for _, y in one.points]
    numbers += [end for one in series for found in one.bounds if found for end in found]
    return plot(series, ticks(max(*numbers, 1.0), min(*numbers, 1.0)), "{:g}×", (1.0, "plain decoding"))


def _acceptance(data: Data) -> Data | None:
    """Share accepted by position in the draft."""
    rows = report.drafted(data)
    if not rows:
        return None
    series = []
    for row in rows:
        shares, proposed = row["acceptance_by_position"], row["proposed_by_position"]
        few = frozenset(float(at) for at, n in enumerate(proposed, 1) if n < FEW * len(row["seconds"]))
        look = 1 if data["kind"] == "sweep" else _look(data["variants"].index(row))
        label = f"draft length {row['draft_length']}" if data["kind"] == "sweep" else row["label"]
        points = [(float(at), 100 * share) for at, share in enumerate(shares, 1)]
        series.append(Series(label, look, points, hollow=few, form="{:.0f}%"))
    drawn = plot(series, [0, 20, 40, 60, 80, 100], "{:g}%")
    drawn["few"] = FEW if any(one.hollow for one in series) else None
    return drawn


def _times(data: Data) -> list[Data]:
    """Where each variant's time went in its middle pass, on the scale of the slowest variant."""
    slowest = max(row["median_seconds"] for row in data["variants"])
    shown = []
    for row in data["variants"]:
        middle = sorted(range(len(row["seconds"])), key=row["seconds"].__getitem__)[len(row["seconds"]) // 2]
        spent = {name: row[f"{name}_seconds"][middle] for name in ("draft", "verify", "rest")}
        scale = row["median_seconds"] / sum(spent.values())  # of an even number of passes the median is no pass's
        parts = [(name, part * scale, 100 * part * scale / slowest) for name, part in spent.items()]
        shown.append({"label": row["label"], "seconds": row["median_seconds"], "parts": parts})
    return shown


def _table(data: Data) -> Data:
    """Heads, and rows of cells; the first is the row's name."""
    rows = [
        {
            "best": report.is_best(data, row),
            "swept": row["draft_length"] is not None,
            "full": row["name"],
            "cells": [report.first_cell(data, row), *(column.cell(row) for column in report.COLUMNS.values())],
        }
        for row in data["variants"]
    ]
    heads = [column.head for column in report.COLUMNS.values()]
    return {"heads": ["draft length" if data["kind"] == "sweep" else "variant", *heads], "rows": rows}
