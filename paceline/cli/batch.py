"""`paceline batch`: every row of a file answered, in order, into another; what is there already is not run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import loading, options, prompting, rows
from paceline.cli.rows import Row
from paceline.errors import OptionError
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import Gathered

IN_HELP = "The rows: a JSON object a line, in the OpenAI batch format or with prompt or messages."
OUT_HELP = "The answers: a JSON object a line, in the order of the rows. What is in it already is not run again."
AHEAD = 16  # rows read ahead of the one to be written, for each that runs: a long answer holds the others up
Line = tuple[bytes, int, str]  # a row as it stands in the file, its number there, and its id
Running = dict[tuple[str, int], tuple[Row, int, "Gathered"]]  # request, sample → row, the sample's place in it, parts


@options.takes(
    options.CHAT_OR_RAW, options.DRAFTERS, options.sampling(max_tokens=256), options.machine(also=("max_num_seqs",))
)
def batch(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help=IN_HELP, show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help=OUT_HELP, show_default=False)],
) -> None:
    """Answer every row of a file, many at the same time, and write the answers in the same order.

    Sampling options hold where a row has none of its own. A row that cannot be
    answered gets an error in its place. Run again, it goes on where it stopped.

    paceline batch requests.jsonl answers.jsonl
    """
    chosen = ctx.params
    prompting.check(chosen["chat"], chosen["prompt_template"])
    defaults = options.read(SamplingParams, chosen)
    SamplingParams(**defaults)  # what it refuses is refused for all rows at once
    drafter = loading.read_drafter(chosen["drafter"], chosen)
    settings = {name: chosen[name] for name in ("model", "chat", "prompt_template")} | defaults
    total = sum(1 for _ in read_lines(source, settings))
    console = Console(stderr=True, highlight=False, markup=False)
    with opened(target, source) as out:
        done = check_written(out, target, read_lines(source, settings))
        if done.rows < total:
            llm = loading.load(chosen, drafter, prefix_caching=True)
            done.start, left = time.perf_counter(), islice(read_lines(source, settings), done.rows, None)
            reader = rows.Reader(llm, defaults, chosen["chat"])
            try:
                with progress(console, total, done) as tell:
                    for row in answers(llm, (reader.read(*line) for line in left), AHEAD * chosen["max_num_seqs"]):
                        done.write(out, row, chosen["model"])
                        tell()
            except KeyboardInterrupt:
                console.print(f"{done.rows} of {total} rows are in {target}; run again, it goes on there")
                raise
            except OSError as error:
                why = error.strerror or error
                raise OptionError(
                    f"{target} could not be written: {why}; once it can, the same command goes on"
                ) from None
    console.print(f"{done}; {target} has all {total}", soft_wrap=True)
    raise typer.Exit(1 if done.failed else 0)


def read_lines(source: Path, settings: dict[str, Any]) -> Iterator[Line]:
    """A file's rows. Their ids say what is asked and how: another model or other options make other ids."""
    begin = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    try:
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    own = begin.copy()
                    own.update(b"%d " % number + line.strip())
                    yield line, number, f"batch_req_{own.hexdigest()[:24]}"
    except OSError as error:
        raise OptionError(f"{source} cannot be read: {error.strerror or error}") from None


# The output


@dataclass
class Done:
    """What is in the output, and what this run did of it."""

    rows: int = 0
    failed: int = 0
    answered: int = 0  # in this run, as all below
    tokens: int = 0
    forwards: int = 0
    start: float = field(default_factory=time.perf_counter)

    @property
    def speed(self) -> float:
        return self.tokens / (time.perf_counter() - self.start)

    def __str__(self) -> str:
        said = f"{self.answered} rows answered, {self.tokens} tokens ({self.speed:.1f} tokens/s)"
        said += f", {self.tokens / self.forwards:.2f} a forward" if self.forwards else ""
        return said + (f"; {self.failed} of all {self.rows} have an error" if self.failed else "")

    def write(self, out: IO[bytes], row: Row, model: str) -> None:
        """The row's line, at once on its way to the disk."""
        told = rows.answer(row, model)
        try:
            line = json.dumps(told, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair in a custom_id
            line = json.dumps(told).encode()
        out.write(line + b"\n")
        out.flush()
        self.rows += 1
        self.answered += 1
        self.failed += told["error"] is not None
        self.tokens += sum(len(output.token_ids) for output in row.outputs.values())
        self.forwards += sum(output.stats.rounds for output in row.outputs.values())


@contextlib.contextmanager
def opened(target: Path, source: Path) -> Iterator[IO[bytes]]:
    """To be written by this process alone. What is no file, such as /dev/stdout, cannot be gone on with."""
    try:
        if target.exists() and target.samefile(source):
            raise OptionError(f"{target} is the input too; give the answers a file of their own")
        known = target.is_file() or not target.exists()
        out = os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT, 0o666), "r+b") if known else target.open("wb")
    except OSError as error:
        raise OptionError(f"{target} cannot be written: {error.strerror or error}") from None
    try:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield out
    except BlockingIOError:
        raise OptionError(f"{target} is being written by another process; wait, or give another name") from None
    finally:
        with contextlib.suppress(OSError):  # what could not be written was said
            out.close()


def check_written(out: IO[bytes], target: Path, asked: Iterator[Line]) -> Done:
    """How far an earlier run came; a line that it did not finish is cut off. Somebody else's file is left alone."""
    found, end = Done(), 0
    if not out.readable():
        return found
    for number, line in enumerate(out, 1):
        id, whole = next(asked, (b"", 0, ""))[2], line.endswith(b"\n")
        mark = f'{{"id": "{id}"'.encode()
        if not id or not (line.startswith(mark) if whole else line[: len(mark)] == mark[: len(line)]):
            raise OptionError(
                f"line {number} of {target} does not answer row {number} as it is asked now (other rows, model or "
                "sampling options); give another name for the answers"
            )
        if whole:
            end += len(line)
            found.rows += 1
            found.failed += json.loads(line)["error"] is not None
    out.seek(end)
    out.truncate()
    return found


@contextlib.contextmanager
def progress(console: Console, total: int, done: Done) -> Iterator[Callable[[], None]]:
    """A bar on the terminal."""
    from rich import progress as bars

    speed = bars.TextColumn("{task.fields[speed]:.0f} tokens/s")
    columns = (bars.TextColumn("rows"), bars.BarColumn(), bars.MofNCompleteColumn(), speed, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done.rows, speed=0.0)
        yield lambda: bar.update(task, completed=done.rows, speed=done.speed)


# The run


def answers(llm: LLM, work: Iterator[Row], ahead: int) -> Iterator[Row]:
    """Rows through the running engine, each as soon as it and all before it are done."""
    waiting: deque[Row] = deque()
    running: Running = {}
    while True:
        for row in islice(work, ahead - len(waiting)):
            waiting.append(row)
            running |= begin(llm, row)
        while waiting and waiting[0].done:
            yield waiting.popleft()
        if not waiting:
            return
        for update in llm.step():
            key = (update.request_id, update.index)
            found = running.get(key)  # None: of a row that was refused meanwhile
            output = found[2].add(update) if found else None
            if found and output:
                found[0].outputs[found[1]] = output
                del running[key]


def begin(llm: LLM, row: Row) -> Running:
    """Queue a row's prompts; where one of them is refused, none of them is."""
    from paceline.outputs import Gathered

    queued: Running = {}
    for prompt, params in zip(row.prompts, row.params):
        try:
            id = llm.add(prompt, params)
        except OptionError as error:
            row.error = str(error)
            for id, _ in queued:
                llm.abort(id)
            return {}
        queued |= {(id, index): (row, len(queued) + index, Gathered()) for index in range(params.n)}
    return queued
