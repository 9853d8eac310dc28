"""What `compare` and `sweep` share: the options of a measurement, from a model to a plan, a bar, files, a table.

Knows the terminal and files. How anything is measured is `paceline.bench`'s.
"""

from __future__ import annotations

import logging
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from paceline.cli import loading, options, prompting
from paceline.cli.options import option
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from paceline.bench.compare import Comparison, Plan, Variant
    from paceline.bench.demos import Question
    from paceline.llm import LLM
    from paceline.prompts import Prompt

log = logging.getLogger("paceline")

DATASET = "A .jsonl or .jsonl.gz file with turns, prompt, question or text; else our own prompts."
DEMO = "Our own prompts: te (English, the default), tc (Chinese) or chat (conversations)."
SHOW = option(
    options.SHOWING,
    "Show an answer, coloured by origin; by default on a terminal.",
    "--show/--no-show",
    show_default=False,
)
ROUNDS = "Repetitions, all variants in turn; the median counts."
# Answers are compared as tokens, one for each prompt, under the rule that keeps every token.
OPTIONS: tuple[options.Group, ...] = (
    {
        "demo": (Annotated[str | None, option(options.PROMPT, DEMO, metavar="NAME")], None),
        "dataset_path": (Annotated[Path | None, option(options.PROMPT, DATASET, metavar="FILE")], None),
    },
    options.CHAT_OR_RAW,
    options.sampling("n", "logprobs", "skip_special_tokens", max_tokens=128, seed=0),
    {
        "rounds": (Annotated[int, option(options.MEASURING, ROUNDS)], 1),
        "batch_size": (Annotated[int, option(options.MEASURING, "Prompts answered at the same time.")], 1),
        "show": (Annotated[bool | None, SHOW], None),
    },
    options.machine("acceptance"),
)


def run(kind: str, chosen: dict[str, Any], variants: list[Variant], questions: list[Question], params: Any) -> None:
    """Load, measure, write and show; Ctrl-C keeps what was measured."""
    from paceline.bench import results

    prompting.check(chosen["chat"], chosen["prompt_template"])
    errors = Console(stderr=True)
    loading.fetch_known([name for variant in variants for name in loading.draft_models(variant.drafter)])
    # No variant may profit from pages that another computed, so nothing is shared between requests.
    llm = loading.load(chosen, None, max_num_seqs=chosen["batch_size"], prefix_caching=False)
    plan = make_plan(llm, questions, chosen, params, variants)
    result = measure(llm, plan, errors)
    if not result.measured:
        raise KeyboardInterrupt  # before the first answer: there is nothing to report
    command = shlex.join(["paceline", *sys.argv[1:]])
    told = {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}
    data = results.record(kind, result, llm.tokenizer, command, told)
    lost = None
    try:
        written = write(data, chosen, errors)
    except OSError as error:  # the figures are shown all the same
        where = error.filename or chosen["output"]
        written, lost = [], PacelineError(f"{where} cannot be written: {error.strerror or error}")
    show(data, sys.stdout.isatty() if chosen["show"] is None else chosen["show"], written)
    if lost is not None:
        raise lost
    if result.interrupted:
        raise KeyboardInterrupt


def check_files(chosen: dict[str, Any]) -> None:
    """Before the measurement rather than after it."""
    name: Path | None = chosen.get("save_output")
    if name is not None and name.suffix.lower() != ".json":
        raise OptionError(f"--save-output {str(name)!r} is not allowed; its name must end in .json")
    if name is not None and name.is_dir():
        raise OptionError(f"--save-output {str(name)!r} is a folder; give the name of a file")
    for folder in (chosen["output"], *([] if name is None else [name.parent])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"the output folder {folder} cannot be made: {error.strerror or error}") from None
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OptionError(f"the output folder {folder} cannot be written to: {error.strerror or error}") from None


# The plan


def make_plan(
    llm: LLM, questions: list[Question], chosen: dict[str, Any], params: Any, variants: list[Variant]
) -> Plan:
    """Questions as prompts, checked against the model before anything runs."""
    from paceline.bench.compare import Plan
    from paceline.requests import check

    prompts = [to_prompt(llm, question, chosen) for question in questions]
    for question, prompt in zip(questions, prompts):
        try:
            check(prompt, params, llm.tokenizer, llm.limits)
        except OptionError as error:
            raise OptionError(f"prompt {question.name!r}: {error}") from None
    lost = sum(_is_lossy(llm, question, prompt) for question, prompt in zip(questions, prompts))
    if lost:
        log.warning(
            "%s's vocabulary lacks characters of %d of %d prompts, so it reads these with holes",
            chosen["model"],
            lost,
            len(prompts),
        )
    return Plan([question.name for question in questions], prompts, params, variants, chosen["rounds"])


def to_prompt(llm: LLM, question: Question, chosen: dict[str, Any]) -> Prompt:
    """A question in the chat template, or as it is; a conversation only in the template."""
    if not question.before:
        return prompting.to_prompt(llm, question.text, chosen["chat"])
    if chosen["chat"] is False:
        raise OptionError("--demo chat asks conversations, which --raw cannot write; leave out one of the two")
    if not prompting.has_template(llm):
        raise OptionError(
            f"--demo chat asks conversations, but {chosen['model']} has no chat template; give --template vicuna, or "
            "--demo te"
        )
    return llm.read_chat(question.messages)


def _is_lossy(llm: LLM, question: Question, prompt: Prompt) -> bool:
    """Whether the tokens no longer have all letters of the question."""
    read = set(llm.tokenizer.decode(prompt.ids)) if llm.tokenizer is not None else set(question.text)
    return any(letter not in read for letter in question.text if letter.isalpha())


def measure(llm: LLM, plan: Plan, console: Console) -> Comparison:
    """The measurement, with a bar on the terminal."""
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from paceline.bench import compare as bench

    count, variants = len(plan.prompts), plan.variants
    labels = {v.name: escape(label) for v, label in zip(variants, bench.labels(variants))}
    passes: list[tuple[str, int]] = []  # begun so far
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    look: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    # Redrawn rarely: the bar's own thread would else take time from what is measured.
    with Progress(*columns, refresh_per_second=2, **look) as progress:
        task = progress.add_task("warming up", total=count * len(variants) * plan.rounds)

        def tell(variant: str, round: int, done: int) -> None:
            if round < 0:
                progress.update(task, description=f"warming up {labels[variant]}")
                return
            if (variant, round) not in passes:
                passes.append((variant, round))
            which = labels[variant] if plan.rounds == 1 else f"{labels[variant]}, round {round + 1} of {plan.rounds}"
            progress.update(task, description=which, completed=(len(passes) - 1) * count + done)

        return bench.compare(llm, plan, tell)


# What comes out


def write(data: dict[str, Any], chosen: dict[str, Any], console: Console) -> list[Path]:
    """report.html, results.json, of a comparison compare.png, and what --save-output names; says what was written."""
    from paceline.bench import page, picture, results

    folder: Path = chosen["output"]
    written = [folder / "report.html", folder / "results.json"]
    results.write(folder / "results.json", data)
    page.write(folder / "report.html", data)
    if data["kind"] == "compare":
        try:
            picture.plot(data, folder / "compare.png")
            written.append(folder / "compare.png")
        except ImportError:
            console.print("compare.png was not drawn: matplotlib is not installed (pip install 'paceline[bench]')")
    if chosen.get("save_output") is not None:
        results.write(chosen["save_output"], data)
        written.append(chosen["save_output"])
    return written


def show(data: dict[str, Any], with_answer: bool, written: list[Path]) -> None:
    from paceline.bench import report

    console = Console()
    console.print(report.table(data))
    positions = report.positions(data)
    if positions is not None:
        console.print(positions)
    console.print(report.verdict(data), style="bold", markup=False, highlight=False)
    for note in report.footnotes(data):
        console.print(note, style="dim", markup=False, highlight=False)
    if with_answer and data["shown"]:
        console.print()
        console.print(report.answer(data["shown"][0]))
    if not written:
        return
    console.print(f"report: {written[0]}", markup=False, highlight=False, soft_wrap=True)
    others = ", ".join(map(str, written[1:]))
    console.print(f"also written: {others}", style="dim", markup=False, highlight=False, soft_wrap=True)
