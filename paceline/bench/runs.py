"""Runs of any kind as rows of one table: who, on what, how fast, how much faster than plain, how much was accepted.

Reads the layouts of `results` and `kinds` alone. Measures nothing, writes no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.bench.report import bounds, share

Data = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One way to decode, on one thing that was asked."""

    run: str
    case: str  # what was asked, how many at a time, how hot
    name: str
    figures: Data  # those that are known

    def get(self, name: str) -> Any:
        return self.figures.get(name)


Cell = Callable[[Any], str]
COLUMNS: dict[str, tuple[str, Cell]] = {
    "tokens_per_second": ("tokens/s", lambda value: f"{value:.1f}"),
    "speed_up": ("speed-up", lambda value: f"{value:.2f}×"),
    "speed_up_interval": ("95% interval", bounds),
    "tokens_per_forward": ("tokens per forward", lambda value: f"{value:.2f}"),
    "acceptance": ("drafts accepted", share),
    "requests_per_second": ("requests/s", lambda value: f"{value:.2f}"),
    "ttft": ("first token, median ms", lambda value: f"{value:.0f}"),
    "tpot": ("per token, median ms", lambda value: f"{value:.1f}"),
    "e2el": ("whole answer, median ms", lambda value: f"{value:.0f}"),
    "failed": ("failed", lambda value: str(value)),
    "same": ("same text as plain", lambda value: str(value)),
}


NARROW = {  # heads where there is little room
    "tokens/s": "tokens\n/s",
    "requests/s": "requests\n/s",
    "95% interval": "95%\ninterval",
    "tokens per forward": "tokens/\nforward",
    "drafts accepted": "drafts\naccepted",
    "first token, median ms": "first\nms",
    "per token, median ms": "token\nms",
    "whole answer, median ms": "whole\nms",
    "same text as plain": "same\ntext",
}


def read_rows(data: Data, run: str) -> list[Row]:
    """Of one run; `run` is what it is called."""
    if data["kind"] == "serve":
        return [_serving(data, run)]
    if data["kind"] == "offline":
        return [row for cell in data["cells"] for row in _variants(cell, run, describe_cell(cell))]
    options = data["options"]
    asked = options.get("dataset_path") or options.get("demo") or "our own prompts"
    return list(_variants(data, run, _case(asked, options["batch_size"], options["temperature"])))


def describe_cell(cell: Data) -> str:
    return _case(cell["dataset"], cell["batch_size"], cell["temperature"])


def _case(dataset: Any, batch_size: int, temperature: float) -> str:
    name = str(dataset).rpartition("/")[2].removesuffix(".gz").removesuffix(".jsonl")
    return f"{name}, {batch_size} at a time, temperature {temperature:g}"


def _variants(found: Data, run: str, case: str) -> Iterator[Row]:
    for variant in found["variants"]:
        figures = {name: variant.get(name) for name in COLUMNS if variant.get(name) is not None}
        figures["acceptance_by_position"] = variant.get("acceptance_by_position") or []
        figures["same"] = f"{variant['identical']}/{variant['answered']}"
        yield Row(run, case, variant["label"], figures)


def _serving(data: Data, run: str) -> Row:
    found, options, spoken = data["figures"], data["options"], data["acceptance"] or {}
    figures = {
        "tokens_per_second": found["output_throughput"],
        "requests_per_second": found["request_throughput"],
        "failed": found["failed"],
        "acceptance": spoken.get("acceptance"),
        "tokens_per_forward": spoken.get("tokens_per_forward"),
        **{name: found[f"median_{name}_ms"] for name in ("ttft", "tpot", "e2el")},
    }
    drafted, accepted = (spoken.get(f"{name}_by_position") or [] for name in ("drafted", "accepted"))
    pairs = itertools.zip_longest(accepted[: len(drafted)], drafted, fillvalue=0)
    figures["acceptance_by_position"] = [taken / given if given else 0.0 for taken, given in pairs]
    rate, most = options["request_rate"], options["max_concurrency"]
    case = f"{options['dataset_name']}, {'all at once' if rate == 'inf' else f'{rate} requests/s'}"
    case += "" if most is None else f", at most {most} at a time"
    known = {name: value for name, value in figures.items() if value is not None}
    return Row(run, case, str(data["server"]["model"]).rpartition("/")[2], known)


def columns(rows: list[Row]) -> dict[str, tuple[str, Cell]]:
    """Those that any row has a value for."""
    return {name: column for name, column in COLUMNS.items() if any(row.get(name) is not None for row in rows)}


def cells(row: Row, shown: dict[str, tuple[str, Cell]]) -> list[str]:
    return ["–" if row.get(name) is None else write(row.get(name)) for name, (_, write) in shown.items()]


def by_case(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return found


def table(rows: list[Row]) -> Group:
    """For the terminal: cases one below the other. Several runs go by letters, which are explained above."""
    runs = list(dict.fromkeys(row.run for row in rows))
    letters = dict(zip(runs, ascii_uppercase)) if len(runs) > 1 else {}
    parts: list[Text | Table] = [Text(f"{letter}: {run}", style="dim") for run, letter in letters.items()]
    for case, listed in by_case(rows).items():
        shown = columns(listed)
        made = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        made.add_column("", overflow="fold")
        for head, _ in shown.values():
            made.add_column(NARROW.get(head, head), justify="right", no_wrap=True)
        for row in listed:
            made.add_row(
                Text(f"{letters[row.run]}: {row.name}" if row.run in letters else row.name), *cells(row, shown)
            )
        parts += [Text(case, style="bold"), made]
    return Group(*parts)


def rates(data: Data) -> list[Table]:
    """Of many datasets: tokens/s, a column a dataset; a table for each batch size and temperature."""
    made = []
    for (batch, temperature), found in itertools.groupby(
        sorted(data["cells"], key=lambda cell: (cell["batch_size"], cell["temperature"])),
        key=lambda cell: (cell["batch_size"], cell["temperature"]),
    ):
        columns = list(found)
        title = f"tokens/s, {batch} at a time, temperature {temperature:g}"
        one = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=title, title_justify="left")
        one.add_column("", overflow="fold")
        for cell in columns:
            one.add_column(cell["dataset"], justify="right")
        known = [{row["label"]: row for row in cell["variants"]} for cell in columns]
        for label in dict.fromkeys(label for rows in known for label in rows):
            one.add_row(Text(label), *(_rate(rows.get(label)) for rows in known))
        made.append(one)
    return made


def _rate(variant: Data | None) -> str:
    if variant is None:
        return "–"
    gained = "" if variant["label"] == "plain" else f" ({variant['speed_up']:.2f}×)"
    return f"{variant['tokens_per_second']:.1f}{gained}"
