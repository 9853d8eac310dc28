"""The command line. One file per command; a command reads options, calls the library and prints.

Nothing heavy is imported before a command runs, so that `paceline --help` answers at once.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli import chat, compare, generate, models, sweep
from paceline.cli.command import EPILOG, Command
from paceline.errors import PacelineError

USAGE_ERROR, INTERRUPTED = 2, 130
log = logging.getLogger("paceline")


class NoticeLines(logging.Handler):
    """What the library logs, as one line each on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        Console(stderr=True).print(Text(f"note: {record.getMessage()}", style="dim"), soft_wrap=True)


class Commands(TyperGroup):
    """Says what paceline refuses in one sentence, and lets Ctrl-C end it without a word."""

    def invoke(self, ctx: Any) -> Any:
        notices = NoticeLines(logging.WARNING)
        log.addHandler(notices)
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            Console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        finally:
            log.removeHandler(notices)


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Speculative decoding that never changes the text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for function in (generate.generate, chat.chat, compare.compare, sweep.sweep):
    app.command(cls=Command, epilog=EPILOG)(function)
app.add_typer(models.app, name="models")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
