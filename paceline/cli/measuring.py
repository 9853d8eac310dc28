"""What `compare` and `sweep` share: the options of a measurement, from a model to a plan, a bar, files, a table.

Knows the terminal and files. How anything is measured is `paceline.bench`'s.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from paceline.bench.prompts import DEFAULT_DEMO, listed_demos
from paceline.cli import loading, options, prompting
from paceline.cli.options import option
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from paceline.bench.measured import Comparison, Plan, Variant
    from paceline.bench.prompts import Question
    from paceline.llm import LLM
    from paceline.params import SamplingParams
    from paceline.prompts import Prompt

REPORT, RESULTS, PICTURE = FILES = ("report.html", "results.json", "compare.svg")
KEPT = "Earlier results stay: the folder's name then gets a number."
DATASET = "A .jsonl or .jsonl.gz file with messages, turns, prompt, question or text; else our own prompts."
DEMO = f"Our own prompts: {listed_demos()}; by default {DEFAULT_DEMO}."
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


def run(
    kind: str, chosen: dict[str, Any], variants: list[Variant], questions: list[Question], params: SamplingParams
) -> None:
    """Load, measure, write and show; Ctrl-C keeps what was measured."""
    from paceline.bench import results
    from paceline.cli.show import note

    prompting.check(chosen["chat"], chosen["prompt_template"])
    errors = Console(stderr=True)
    drafts = [name for variant in variants for name in loading.draft_models(variant.drafter)]
    loading.fetch_known(drafts, chosen["accept_licence"])
    # No variant may profit from pages that another computed, so nothing is shared between requests.
    llm = loading.load(chosen, None, max_num_seqs=chosen["batch_size"], prefix_caching=False)
    plan = make_plan(llm, questions, chosen, params, variants)
    result = measure(llm, plan, errors)
    if not result.measured:
        raise KeyboardInterrupt  # before the first answer: there is nothing to report
    command = typed()
    data = results.record(kind, result, llm.tokenizer, command, chosen)
    lost = None
    try:
        written = write(data, chosen)
    except OSError as error:  # the figures are shown all the same
        where = error.filename or chosen["output"]
        written, lost = [], PacelineError(f"{where} cannot be written: {error.strerror or error}")
    show(data, sys.stdout.isatty() if chosen["show"] is None else chosen["show"], written, Console())
    if lost is not None:
        raise lost
    folder = written[0].parent
    if folder != chosen["output"]:
        note(f"{chosen['output']} holds earlier results, which stay; these are in {folder}")
    if result.interrupted:
        raise KeyboardInterrupt


def typed() -> str:
    """The command as it could be typed again."""
    return shlex.join(["paceline", *sys.argv[1:]])


def check_files(chosen: dict[str, Any]) -> None:
    """Before the measurement rather than after it."""
    name: Path | None = chosen.get("save_output")
    if name is not None and name.suffix.lower() != ".json":
        raise OptionError(f"--save-output {str(name)!r} is not allowed; its name must end in .json")
    if name is not None and os.path.exists(name):
        what = "a folder" if name.is_dir() else "there already, and is not overwritten"
        raise OptionError(f"--save-output {str(name)!r} is {what}; give the name of a new file")
    for folder in (free_folder(chosen["output"]), *([] if name is None else [name.parent])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"the output folder {folder} cannot be made: {error.strerror or error}") from None
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OptionError(f"the output folder {folder} cannot be written to: {error.strerror or error}") from None


def free_folder(folder: Path) -> Path:
    """The folder itself, or, where it holds results, the first of NAME-2, NAME-3 … that holds none."""
    number, free = 1, folder
    while any(os.path.exists(free / name) for name in FILES):  # unlike Path's, it answers for folders nobody may read
        number += 1
        here = folder.name in ("", "..")
        free = folder / f"results-{number}" if here else folder.with_name(f"{folder.name}-{number}")
    return free


# The plan


def make_plan(
    llm: LLM, questions: list[Question], chosen: dict[str, Any], params: SamplingParams, variants: list[Variant]
) -> Plan:
    """Questions as prompts, checked against the model before anything runs."""
    from paceline.bench.measured import Plan
    from paceline.requests import check

    prompts = [to_prompt(llm, question, chosen) for question in questions]
    for question, prompt in zip(questions, prompts):
        try:
            check(prompt, params, llm.tokenizer, llm.limits)
        except OptionError as error:
            raise OptionError(f"prompt {question.name!r}: {error}") from None
    return Plan([question.name for question in questions], prompts, params, variants, chosen["rounds"])


def to_prompt(llm: LLM, question: Question, chosen: dict[str, Any]) -> Prompt:
    """A question in the chat template, or as it is; a conversation only in the template."""
    if not question.is_conversation:
        return prompting.to_prompt(llm, question.text, chosen["chat"])
    if chosen["chat"] is False:
        raise OptionError(f"prompt {question.name!r} is a conversation, which --raw cannot write; leave out --raw")
    if not prompting.has_template(llm):
        raise OptionError(
            f"prompt {question.name!r} is a conversation, but {chosen['model']} has no chat template; give "
            "--template vicuna"
        )
    return llm.read_chat(question.messages)


def measure(llm: LLM, plan: Plan, console: Console, label: str = "") -> Comparison:
    """The measurement, with a bar on the terminal; `label` says which of several it is."""
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

    answered: dict[tuple[str, int], int] = {}
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    look: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    # Redrawn rarely: the bar's own thread would else take time from what is measured.
    with Progress(*columns, refresh_per_second=2, **look) as progress:
        task = progress.add_task("warming up", total=len(plan.prompts) * len(plan.variants) * plan.rounds)

        def tell(variant: str, round: int, done: int) -> None:
            if round < 0:
                progress.update(task, description=f"{label}warming up {escape(variant)}")
                return
            answered[variant, round] = done
            which = "measuring" if plan.rounds == 1 else f"round {round + 1} of {plan.rounds}"
            progress.update(task, description=label + which, completed=sum(answered.values()))

        return bench.compare(llm, plan, tell)


# What comes out


def write(data: dict[str, Any], chosen: dict[str, Any]) -> list[Path]:
    """report.html, results.json, of a comparison compare.svg, and what --save-output names; the report comes first."""
    from paceline.bench import page, results

    folder = free_folder(chosen["output"])
    texts = {folder / REPORT: page.render(data), folder / RESULTS: results.to_text(data)}
    if data["kind"] == "compare":
        texts[folder / PICTURE] = page.draw(data)
    if chosen.get("save_output") is not None:
        texts[chosen["save_output"]] = results.to_text(data)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:  # what came into being meanwhile is not overwritten either
            file.write(text)
    return list(texts)


def show(data: dict[str, Any], with_answer: bool, written: list[Path], console: Console) -> None:
    from paceline.bench import report

    plain: Any = {"markup": False, "highlight": False}
    console.print(report.table(data))
    positions = report.positions(data)
    if positions is not None:
        console.print(positions)
    console.print(report.verdict(data), style="bold", **plain)
    for said in report.footnotes(data):
        console.print(said, style="dim", **plain)
    if with_answer and data["shown"]:
        console.print()
        console.print(report.answer(data["shown"][0]))
    if written:
        console.print(f"report: {written[0]}", soft_wrap=True, **plain)
        console.print(f"also written: {', '.join(map(str, written[1:]))}", style="dim", soft_wrap=True, **plain)
