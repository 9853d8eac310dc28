"""`paceline bench serve`: how fast an OpenAI server answers, whoever's it is."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli import measuring, options
from paceline.cli.command import is_given, need
from paceline.cli.options import option
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from paceline.bench.asks import Wanted
    from paceline.bench.client import Server
    from paceline.bench.serving import Run

SERVER, LOAD, ASKED = "Server", options.MEASURING, options.PROMPT
BACKENDS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "vllm": "/v1/completions",
    "paceline": "/v1/completions",
}
TOKENIZER_HELP = "A model's name or path, whose tokenizer counts and makes prompts; else the server's own routes."
DATASET_HELP = "random, sharegpt, spec-bench (turns) or jsonl (messages, turns, prompt, question or text)."
LENGTH_HELP = "The most tokens of an answer; else 256, of sharegpt the recorded answer's."
RATE_HELP = "Requests a second, arriving at random; inf sends them all at once."
BURST_HELP = "1: Poisson arrivals; less: they come in clusters; more: evenly."
SAVE_HELP = "Write results.json and a report in HTML."
EXTRA_HELP = "JSON that goes into every request, as in '{\"top_p\": 0.9}'."
SHOWN_HELP = "Which of ttft, tpot, itl and e2el are shown."

OPTIONS: options.Group = {
    "backend": (
        Annotated[str, option(SERVER, f"{', '.join(BACKENDS)}: which route is asked.", metavar="NAME")],
        "openai",
    ),
    "base_url": (Annotated[str | None, option(SERVER, "As in http://host:8000; else --host and --port.")], None),
    "host": (Annotated[str, option(SERVER, "The server's address.")], "127.0.0.1"),
    "port": (Annotated[int, option(SERVER, "The server's port.", min=1, max=65535)], 8000),
    "endpoint": (
        Annotated[str | None, option(SERVER, "The route; else the backend's.", metavar="PATH")],
        None,
    ),
    "model": (Annotated[str | None, option(SERVER, "Its name there; else the first of /v1/models.")], None),
    "tokenizer": (Annotated[str | None, option(SERVER, TOKENIZER_HELP)], None),
    "api_key": (Annotated[str | None, option(SERVER, "Sent as a bearer token.", metavar="KEY")], None),
    "dataset_name": (Annotated[str, option(ASKED, DATASET_HELP)], "random"),
    "dataset_path": (Annotated[Path | None, option(ASKED, "The dataset's file.", metavar="FILE")], None),
    "num_prompts": (Annotated[int, option(ASKED, "Requests.")], 100),
    "random_input_len": (Annotated[int, option(ASKED, "Tokens of a random prompt.")], 1024),
    "random_output_len": (Annotated[int, option(ASKED, "The most tokens of an answer to one.")], 128),
    "random_range_ratio": (Annotated[float, option(ASKED, "Lengths lie so far around these: 0.1 is 10%.")], 0.0),
    "output_len": (
        Annotated[
            int | None,
            option(ASKED, LENGTH_HELP, "--output-len", "--sharegpt-output-len", "--spec-bench-output-len"),
        ],
        None,
    ),
    "request_rate": (Annotated[float, option(LOAD, RATE_HELP)], math.inf),
    "burstiness": (Annotated[float, option(LOAD, BURST_HELP)], 1.0),
    "max_concurrency": (Annotated[int | None, option(LOAD, "The most requests under way at once.")], None),
    "seed": (Annotated[int, option(LOAD, "Of random prompts and arrivals.")], 0),
    "percentile_metrics": (Annotated[str, option(LOAD, SHOWN_HELP)], "ttft,tpot,itl,e2el"),
    "metric_percentiles": (Annotated[str, option(LOAD, "As in 50,99.")], "50,90,95,99"),
    "temperature": (Annotated[float, option(options.SAMPLING, "0: greedy.")], 0.0),
    "ignore_eos": (
        Annotated[bool, option(options.SAMPLING, "Answers have all their tokens.", show_default=False)],
        False,
    ),
    "extra_body": (Annotated[str | None, option(options.SAMPLING, EXTRA_HELP, metavar="JSON")], None),
    "save_result": (Annotated[bool, option(options.FILES, SAVE_HELP, show_default=False)], False),
    "result_dir": (Annotated[Path, option(options.FILES, "Where to.", metavar="FOLDER")], Path()),
    "result_filename": (
        Annotated[str | None, option(options.FILES, "The results' file, NAME.json; else named after the run.")],
        None,
    ),
}


@options.takes(OPTIONS)
def serve(ctx: typer.Context) -> None:
    """Send requests to a running OpenAI server and measure how fast it answers.

    paceline bench serve --port 8000 --dataset-name random --num-prompts 20
    """
    need("what asks a server", "httpx")
    from paceline.bench.asks import Wanted

    chosen = ctx.params
    length = chosen["output_len"]
    if chosen["dataset_name"] == "random" and length is None:
        length = chosen["random_output_len"]
    wanted = Wanted(
        chosen["dataset_name"],
        chosen["dataset_path"],
        chosen["num_prompts"],
        chosen["seed"],
        chosen["random_input_len"],
        length,
        chosen["random_range_ratio"],
    )
    if is_given(ctx, "result_filename") and not chosen["result_filename"].endswith(".json"):
        raise OptionError(f"--result-filename {chosen['result_filename']} is not allowed; its name must end in .json")
    run_it(chosen, wanted, read_server(chosen))


def read_server(chosen: dict[str, Any]) -> Server:
    from paceline.bench.client import CHAT, Server

    if chosen["backend"] not in BACKENDS:
        raise OptionError(f"--backend {chosen['backend']} is not known; allowed: {', '.join(BACKENDS)}")
    route = chosen["endpoint"] or BACKENDS[chosen["backend"]]
    if not route.startswith("/"):
        raise OptionError(f"--endpoint {route} is not allowed; a route begins with /, as in {CHAT}")
    base = chosen["base_url"] or f"http://{chosen['host']}:{chosen['port']}"
    if not re.match(r"https?://", base):
        raise OptionError(f"--base-url {base} is not allowed; allowed: an address as in http://host:8000")
    extra: dict[str, Any] = {"temperature": chosen["temperature"]}
    if chosen["ignore_eos"]:
        extra["ignore_eos"] = True
    if chosen["extra_body"] is not None:
        try:
            extra |= dict(json.loads(chosen["extra_body"]))
        except (ValueError, TypeError):
            raise OptionError(f"--extra-body {chosen['extra_body']!r:.60} is not a JSON object") from None
    return Server(base.rstrip("/").removesuffix("/v1"), route, chosen["model"], chosen["api_key"], extra)


def read_percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 100 for share in found):
        raise OptionError(f"--metric-percentiles {text} is not allowed; allowed: numbers from 0 to 100, as in 50,99")
    return found


def run_it(chosen: dict[str, Any], wanted: Wanted, server: Server) -> None:
    """Ask, measure, show and write; Ctrl-C keeps what was measured."""
    from paceline.bench import kinds
    from paceline.bench.serving import METRICS

    percentiles = read_percentiles(chosen["metric_percentiles"])
    shown = [name.strip() for name in chosen["percentile_metrics"].split(",")]
    unknown = [name for name in shown if name not in METRICS]
    if unknown:
        raise OptionError(f"--percentile-metrics {unknown[0]!r} is not known; allowed: {', '.join(METRICS)}")
    run = asyncio.run(measure(chosen, wanted, server))
    told = {**chosen, "request_rate": "inf" if math.isinf(chosen["request_rate"]) else chosen["request_rate"]}
    data = kinds.record_serving(run, server, measuring.typed(), told, percentiles)
    console = Console()
    if run.replies:
        show(data, shown, percentiles, console)
    if chosen["save_result"] and run.replies:
        for path in write(data, chosen):
            console.print(f"written: {path}", soft_wrap=True, markup=False, highlight=False)
    if run.interrupted:
        raise KeyboardInterrupt
    errors = [reply.error for reply in run.replies if reply.error is not None]
    if len(errors) == len(run.replies):
        raise PacelineError(f"none of the {len(errors)} requests was answered: {errors[0]}")


async def measure(chosen: dict[str, Any], wanted: Wanted, server: Server) -> Run:
    from paceline.bench import asks, client, serving

    async with server.open() as http:
        if chosen["tokenizer"] is not None:
            from paceline.models import loader

            speller = asks.local_speller(loader.read_tokenizer(chosen["tokenizer"]))
        else:
            speller = await asks.server_speller(http, server)
        listed = await asks.read_asks(wanted, speller)
        load = serving.Load(
            listed, chosen["request_rate"], chosen["burstiness"], chosen["max_concurrency"], chosen["seed"]
        )
        first = client.Ask(listed[0].prompt, min(4, listed[0].max_tokens), listed[0].messages)
        await client.settle(http, server, first)
        with bar(len(listed)) as tell:
            return await serving.drive(http, server, load, tell)


@contextmanager
def bar(total: int) -> Iterator[Any]:
    """Requests that ended, of all."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    look: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, refresh_per_second=2, **look) as progress:
        task = progress.add_task("asking", total=total)
        yield lambda ended, running: progress.update(task, completed=ended, description=f"{running} under way")


def show(data: dict[str, Any], metrics: list[str], percentiles: tuple[float, ...], console: Console) -> None:
    found, spoken = data["figures"], data["acceptance"]
    uncounted = found["total_input_tokens"] is None
    rows: list[tuple[str, str]] = [
        ("requests answered", f"{found['completed']}" + (f", {found['failed']} failed" if found["failed"] else "")),
        ("seconds", f"{found['duration']:.2f}"),
        ("prompt tokens", "not told; --tokenizer would count them" if uncounted else str(found["total_input_tokens"])),
        ("answer tokens", f"{found['total_output_tokens']}"),
        ("requests/s", f"{found['request_throughput']:.3f}"),
        ("answer tokens/s", f"{found['output_throughput']:.1f}"),
        ("all tokens/s", "–" if uncounted else f"{found['total_token_throughput']:.1f}"),
        ("most requests at once", f"{found['max_concurrent_requests']}"),
    ]
    if spoken is not None and spoken["acceptance"] is not None:
        per_forward = spoken["tokens_per_forward"]
        also = "" if per_forward is None else f", {per_forward:.2f} tokens per target forward"
        rows.append(("drafts accepted", f"{spoken['acceptance']:.1%} of {spoken['drafted']}{also}"))
    plain = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        plain.add_row(name, value)
    console.print(plain)
    heads = ["mean", "median", *(f"p{share:g}" for share in percentiles if share != 50)]  # which is the median
    times = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    times.add_column("milliseconds")
    for head in heads:
        times.add_column(head, justify="right")
    names = {"ttft": "first token (TTFT)", "tpot": "per further token (TPOT)"}
    names |= {"itl": "between pieces (ITL)", "e2el": "whole answer (E2EL)"}
    for metric in metrics:
        values = [found[f"{head}_{metric}_ms"] for head in heads]
        times.add_row(names[metric], *("–" if value is None else f"{value:.2f}" for value in values))
    console.print(times)
    errors = {request["error"] for request in data["requests"]} - {None}
    for error in sorted(errors)[:3]:
        console.print(f"failed: {error}", style="yellow", markup=False, highlight=False)
    if data["interrupted"]:
        console.print("interrupted: what had been answered by then is counted", style="dim")


def write(data: dict[str, Any], chosen: dict[str, Any]) -> list[Path]:
    """The results, and the report beside them; earlier files stay."""
    from paceline.bench import results, runs_page

    name = re.sub(r"[^\w.-]+", "-", str(data["server"]["model"]).rpartition("/")[2])
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    file = chosen["result_filename"] or f"{chosen['backend']}-{data['options']['request_rate']}qps-{name}-{stamp}.json"
    path = Path(chosen["result_dir"]) / file
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{Path(file).stem}-{number}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    page = path.with_suffix(".html")
    path.write_text(results.to_text(data), encoding="utf-8")
    page.write_text(runs_page.render({path.stem: data}), encoding="utf-8")
    return [path, page]
