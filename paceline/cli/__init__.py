"""The command line. One file per command; a command reads options, calls the library and prints.

Nothing heavy is imported before a command runs, so that `paceline --help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from paceline import __version__
from paceline.cli import batch, bench, chat, check, compare, extract_mtp, generate, models, serve, sweep
from paceline.cli.command import EPILOG, Command, Group
from paceline.errors import PacelineError

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
MEASURES = "is called paceline bench offline here"
ELSEWHERE = {
    "api_server": "is called paceline serve here",
    "benchmark_serving": "is called paceline bench serve here",
    **dict.fromkeys(("benchmark_throughput", "benchmark_latency"), MEASURES),
    "train": "is not there yet: drafters can be loaded and compared, not trained",
    "run_batch": "is called paceline batch here",
}
STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
log = logging.getLogger("paceline")


class NoticeLines(logging.Handler):
    """What the library logs, as one line each on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}", "dim")


def say(text: str, style: str) -> None:
    """One line on standard error, whatever is in it; where nobody can read it, it is not said."""
    with contextlib.suppress(OSError):
        Console(stderr=True).print(Text(text, style=style), soft_wrap=True)


class Commands(Group):
    """Says what paceline refuses in one sentence, and lets Ctrl-C end it without a word."""

    elsewhere = ELSEWHERE

    def main(self, *args: Any, **more: Any) -> Any:
        try:
            return super().main(*args, **more)
        except PacelineError as error:
            say(str(error), "red")
            sys.exit(USAGE_ERROR)
        except OSError as error:  # a disk or a folder, but no pipe whose reader has enough: that ends without a word
            where = "the output could not be written" if error.filename is None else error.filename
            say(f"{where}: {error.strerror or error}", "red")
            sys.exit(FAILED)

    def invoke(self, ctx: Any) -> Any:
        notices = NoticeLines(logging.WARNING)
        log.addHandler(notices)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        finally:
            log.removeHandler(notices)


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Speculative decoding that never changes the text.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (generate.generate, chat.chat, serve.serve, batch.batch, compare.compare, sweep.sweep, check.check):
    app.command(cls=Command, epilog=EPILOG)(function)
app.command("extract-mtp", cls=Command)(extract_mtp.extract_mtp)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Say the version and end.")] = False,
) -> None:
    if version:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """The program. A stream that is closed or full ends it with a sentence, as far as one can still be said."""
    # What is imported and loaded stays. Looking through it for garbage takes a tenth of the start, and the end's half.
    gc.set_threshold(50_000, 20)
    _open_streams()
    code: Any = FAILED
    try:
        app(prog_name="paceline")
    except SystemExit as ended:
        code = ended.code
    gc.freeze()
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            say(f"standard output could not be written: {error.strerror}", "red")
        code = code or FAILED
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left would be written, and refused, once more
    sys.exit(code)


def _open_streams() -> None:
    """Closed streams lead nowhere. Left closed, the next file to be opened would take a stream's place."""
    closed = [name for name, mode in STREAMS.items() if not _is_open(getattr(sys, name), mode)]
    for name in closed:
        setattr(sys, name, open(os.devnull, STREAMS[name]))  # noqa: SIM115 - until the end
    if "stdout" in closed:
        say("standard output is closed, so nothing could be written to it; > /dev/null drops it on purpose", "red")
        sys.exit(FAILED)


def _is_open(stream: Any, mode: str) -> bool:
    """Some shells leave a file of their own in a closed stream's place, which is open the other way."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import fcntl

        way = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY) if stream else None
        return way == os.O_RDWR or way == (os.O_RDONLY if mode == "r" else os.O_WRONLY)
    return stream is not None
