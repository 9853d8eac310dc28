"""`paceline bench report`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli import options
from paceline.cli.options import option

FILES_HELP = "Results: a results.json of compare, sweep or bench offline, or what bench serve saved."
OUTPUT_HELP = "The page to write."
NAME_HELP = "What a run is called, once for each file in their order; else its file's or folder's name."


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=FILES_HELP, show_default=False)],
    name: Annotated[list[str] | None, option(options.SHOWING, NAME_HELP, metavar="TEXT")] = None,
    output: Annotated[Path, option(options.FILES, OUTPUT_HELP)] = Path("bench-report.html"),
) -> None:
    """Put measurements side by side: a table here, plots in one HTML page.

    paceline bench report A.json B.json
    """
    from paceline.bench import kinds, runs, runs_page
    from paceline.errors import OptionError

    if name and len(name) != len(files):
        raise OptionError(f"--name was given {len(name)} times for {len(files)} files; give it once for each")
    found = dict(zip(distinct(list(name or map(call, files))), map(kinds.read, files), strict=True))
    rows = [row for called, data in found.items() for row in runs.read_rows(data, called)]
    console = Console()
    console.print(runs.table(rows))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(runs_page.render(found), encoding="utf-8")
    console.print(f"report: {output}", soft_wrap=True, markup=False, highlight=False)


def call(file: Path) -> str:
    """By its folder where the file is called as they all are."""
    return file.resolve().parent.name if file.name == "results.json" else file.stem


def distinct(names: list[str]) -> list[str]:
    """A number behind those that are there already."""
    made: list[str] = []
    for name in names:
        number, free = 1, name
        while free in made:
            number += 1
            free = f"{name} ({number})"
        made.append(free)
    return made
