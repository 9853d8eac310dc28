"""`paceline models`: what can be had by name, and getting or dropping it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="List the models known by name; fetch or remove one.", invoke_without_command=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from the list.", show_default=False)]


@app.callback()
def models(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        from paceline.models import catalog

        Console().print(catalog.table())


@app.command()
def fetch(name: Name) -> None:
    """Bring a model into the cache, and say where its file is."""
    from paceline.models import catalog

    typer.echo(str(catalog.ensure(name)))


@app.command()
def remove(name: Name) -> None:
    """Drop a model from the cache."""
    from paceline.models import catalog

    typer.echo(f"{name} was removed" if catalog.remove(name) else f"{name} was not in the cache")
