"""`paceline bench`: measurements for the record. Its commands stand in files of their own."""

from __future__ import annotations

import typer

from paceline.cli import bench_offline, bench_report, bench_serve
from paceline.cli.command import EPILOG, Command, Group

HELP = """Measure a server, or many datasets with many drafters; put runs side by side.

One thing at a time is measured by paceline compare and paceline sweep, which write the same kind of files.
"""


class Benches(Group):
    elsewhere = {  # noqa: RUF012 - as its base declares it
        "throughput": "is called paceline bench offline here",
        "latency": "is called paceline bench offline here, with --batch-size",
        "compare": "is called paceline compare here",
        "sweep": "is called paceline sweep here",
    }


app = typer.Typer(cls=Benches, help=HELP, no_args_is_help=True)
for name, function in (
    ("serve", bench_serve.serve),
    ("offline", bench_offline.offline),
    ("report", bench_report.report),
):
    app.command(name, cls=Command, epilog=EPILOG)(function)
