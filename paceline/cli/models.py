"""`paceline models`: what can be had by name, what of it is here and where, and getting or dropping it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli import loading
from paceline.cli.command import Command, Group
from paceline.errors import FetchError, nearest
from paceline.models import catalog
from paceline.models.catalog import ALIASES, DEFAULT_MODEL, Alias, human_size

HELP = """List the models known by name, and what of them is on this machine.

Any other model goes by the path of its folder or .gguf file, or by its hub id, straight after --model.
"""
WORTH_TELLING = 100_000  # bytes of a fetch that was cut
ACCEPT_HELP = "Agree to the model's licence, where it asks for that; else you are asked at a terminal."
NAME_HELP = "A name from `paceline models`."

app = typer.Typer(cls=Group, help=HELP, invoke_without_command=True)


@app.callback()
def models(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        show()


@app.command("list", cls=Command)
def show() -> None:
    """What `paceline models` alone shows."""
    console = Console()
    console.print(catalog.table())
    for line in describe():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(cls=Command)
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP)] = DEFAULT_MODEL,
    accept_licence: Annotated[bool, typer.Option("--accept-licence", help=ACCEPT_HELP)] = False,
) -> None:
    """Bring a model into the cache, check every byte of it, and say where its file is.

    A fetch that was cut goes on where it ended, and a damaged file is fetched anew. Commands fetch what they need by
    themselves.
    """
    typer.echo(str(loading.fetch(find(name).name, renew=True, accept=accept_licence)))


@app.command(cls=Command)
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP, show_default=False)]) -> None:
    """Drop a model, or what a cut fetch left of it, from the cache."""
    alias = find(name)
    size = held(alias)
    if catalog.remove(alias):
        freed = f" ({human_size(size)})"
        typer.echo(f"{alias.name} was removed{freed}; paceline models fetch {alias.name} brings it back")
    else:
        typer.echo(f"{alias.name} was not in the cache")


def find(name: str) -> Alias:
    """The alias of that name; else a sentence with what to type."""
    alias = catalog.find(name)
    if alias is not None:
        return alias
    if "/" in name or name.endswith(".gguf"):
        hint = f"a path or hub id needs no fetching: type paceline generate --model {name}"
    else:
        near = nearest(name, ALIASES)
        hint = f"did you mean {near}?" if near else f"type one of {', '.join(ALIASES)}"
    raise FetchError(f"{name!r} is not a model known by name; {hint}")


def held(alias: Alias) -> int:
    """Bytes that the cache holds of a model, whole or not."""
    return sum(file.stat().st_size for file in catalog.home_of(alias).rglob("*") if file.is_file())


def describe() -> Iterator[str]:
    """What each model is good for, where it lies, and what to type next."""
    widest = max(len(name) for name in ALIASES)
    for alias in ALIASES.values():
        yield f" {alias.name:<{widest}}  {alias.description}"
        if alias.terms:
            state = "accepted" if catalog.is_accepted(alias) else "to accept once"
            yield f" {'':<{widest}}  licence {state}: {alias.terms}"
        path = catalog.cached_path(alias)
        if path is not None:
            yield f" {'':<{widest}}  {path}"
        elif (size := held(alias)) >= WORTH_TELLING:
            yield f" {'':<{widest}}  {human_size(size)} of it are here; fetch goes on from there"
    yield ""
    missing = next((name for name in ALIASES if catalog.cached_path(name) is None), None)
    if missing is not None:
        yield f" Fetch one:  paceline models fetch {missing}"
    yield f' Use one:    paceline generate --model {DEFAULT_MODEL} "Name three fruits."'
    yield f" The cache:  {catalog.cache_dir()} (PACELINE_HOME moves it)"
    if tiles := sum(file.stat().st_size for file in (catalog.cache_dir() / "tiles").glob("*.tiles")):
        yield f" Its tiles:  {human_size(tiles)} of packed weights of other models; they may be deleted"
