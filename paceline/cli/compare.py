"""`paceline compare`: the same prompts plain and with drafters, side by side."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import options
from paceline.errors import OptionError
from paceline.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.bench.compare import Comparison, Plan
    from paceline.llm import LLM

RESULTS = Path("compare-results")
DRAFTER_HELP = (
    "ngram, suffix or a draft model, with options as in ngram:max_match=3,min_match=1; once for each to compare. "
    "By default ngram and suffix."
)
DATASET_HELP = "A .jsonl or .jsonl.gz file with turns, prompt, question or text; else our own prompts."
SHOW_HELP = "Show an answer, coloured by origin; by default on a terminal."


def compare(
    ctx: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    drafter: Annotated[list[str] | None, typer.Option(help=DRAFTER_HELP)] = None,
    dataset_path: Annotated[Path | None, typer.Option(help=DATASET_HELP)] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens per answer.")] = 128,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling noise, where the temperature is above 0.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts answered at the same time.")] = 1,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions; the median counts.")] = 1,
    output: Annotated[Path, typer.Option(help="The folder for results.json and compare.png.")] = RESULTS,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantization: options.Quantization = None,
    drafter_quantization: options.DrafterQuantization = None,
    chat: options.Chat = None,
    show: Annotated[bool | None, typer.Option("--show/--no-show", help=SHOW_HELP, show_default=False)] = None,
) -> None:
    """Measure plain decoding against drafters on the same prompts, and check that the text is the same."""
    from paceline.bench.prompts import read_questions
    from paceline.llm import LLM
    from paceline.params import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    variants = read_variants(drafter or ["ngram", "suffix"], drafter_quantization)
    questions = read_questions(dataset_path, num_prompts)
    check_folder(output)
    errors = Console(stderr=True)
    with errors.status(f"loading {model}"):
        # No variant may profit from pages that another computed, so nothing is shared between requests.
        engine = {"max_num_seqs": batch_size, "prefix_caching": False, "kernels": kernels, "quantization": quantization}
        llm = LLM(model, dtype=dtype, device=device, **engine)
    plan = make_plan(llm, questions, chat, params, (variants, rounds))
    result = measure(llm, plan, errors)
    if not result.measured:
        raise KeyboardInterrupt  # before plain decoding was through: there is nothing to report
    write(result, output, {name: _plain(value) for name, value in ctx.params.items()}, errors)
    show_result(result, llm, sys.stdout.isatty() if show is None else show)
    if result.interrupted:
        raise KeyboardInterrupt


def read_variants(specs: list[str], quantization: str | None = None) -> list[Any]:
    from paceline.bench.compare import Variant
    from paceline.cli import drafters

    return [Variant(spec, drafters.with_quantization(drafters.parse(spec), quantization)) for spec in specs]


def check_folder(folder: Path) -> None:
    """Before the measurement rather than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"the output folder {folder} cannot be made: {error.strerror or error}") from None


def make_plan(llm: LLM, questions: list[Any], chat: bool | None, params: Any, what: tuple[list[Any], int]) -> Plan:
    """Questions as prompts, checked against the model before anything runs."""
    from paceline.bench.compare import Plan
    from paceline.cli import prompting
    from paceline.prompts import check_params

    prompts = [prompting.to_prompt(llm, question.text, chat) for question in questions]
    for question, prompt in zip(questions, prompts):
        try:
            check_params(params, prompt, llm.config.vocab_size, llm.max_model_len)
        except OptionError as error:
            raise OptionError(f"prompt {question.name!r}: {error}") from None
    return Plan([question.name for question in questions], prompts, params, *what)


def measure(llm: LLM, plan: Plan, console: Console) -> Comparison:
    """The measurement, with a bar on the terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.bench import compare as bench

    count = len(plan.prompts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn rarely: the bar's own thread would else take time from what is measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        task = progress.add_task("warming up", total=count * len(plan.variants) * plan.rounds)
        places = {variant.name: place for place, variant in enumerate(plan.variants)}

        def tell(variant: str, round: int, done: int) -> None:
            if round < 0:
                progress.update(task, description=f"warming up {variant}")
                return
            before = (round * len(places) + places[variant]) * count
            which = variant if plan.rounds == 1 else f"{variant}, round {round + 1} of {plan.rounds}"
            progress.update(task, description=which, completed=before + done)

        return bench.compare(llm, plan, tell)


def write(result: Comparison, folder: Path, options: dict[str, Any], console: Console) -> None:
    """results.json and compare.png."""
    from paceline.bench import machine, report

    command = shlex.join(["paceline", *sys.argv[1:]])
    data = {"command": command, **machine.record(), "options": options, **report.record(result)}
    report.write_json(folder / "results.json", data)
    try:
        report.plot(result, folder / "compare.png", describe(result, options))
    except ImportError:
        console.print("compare.png was not drawn: matplotlib is not installed (pip install 'paceline[bench]')")


def describe(result: Comparison, options: dict[str, Any]) -> str:
    """What was measured where, as the picture's title."""
    from paceline.bench import machine

    name, count = Path(options["model"]).name, len(result.plan.prompts)
    asked = f"{count} prompts, at most {options['max_tokens']} tokens each, {options['batch_size']} at a time"
    return f"{name} on {machine.summary()}\n{asked}"


def show_result(result: Comparison, llm: LLM, with_answer: bool) -> None:
    from paceline.bench import report

    console = Console()
    console.print(report.table(result))
    for note in report.footnotes(result):
        console.print(note, style="dim", markup=False)
    if result.interrupted:
        console.print("interrupted: only passes over all prompts that were complete are counted", style="dim")
    answer = report.answer(result, llm.tokenizer) if with_answer else None
    if answer is not None:
        console.print(answer)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
