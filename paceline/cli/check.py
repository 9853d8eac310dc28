"""`paceline check`: does speculation change the text? On one's own target, drafter and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import loading, measuring, options, prompting
from paceline.cli.options import option
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.bench.check import Exact, Found
    from paceline.bench.distribution import Distribution

DIFFERENT = 1
DRAFTER_HELP = f"{options.drafter_help()} Several are asked in that order. By default ngram."
SAMPLES_HELP = "Samples after each context, where the rule keeps the distribution and not the tokens."
ALPHA_HELP = "How often chance alone may be taken for a difference."
SAVE_HELP = "Write what was found to this file; its name must end in .json."

OPTIONS: options.Group = {
    "drafter": (Annotated[list[str] | None, option(options.DRAFTING, DRAFTER_HELP, metavar="SPEC")], None),
    "num_draft_tokens": (Annotated[int | None, option(options.DRAFTING, options.COUNT)], None),
    "demo": measuring.OPTIONS[0]["demo"],
    "dataset_path": measuring.OPTIONS[0]["dataset_path"],
    "num_prompts": (Annotated[int, option(options.PROMPT, "Only the first so many prompts.")], 8),
    "contexts": (Annotated[int, option(options.MEASURING, "Texts that are gone on from.")], 4),
    "samples": (Annotated[int, option(options.MEASURING, SAMPLES_HELP)], 800),
    "depth": (Annotated[int, option(options.MEASURING, "Tokens of each sample.")], 4),
    "alpha": (Annotated[float, option(options.MEASURING, ALPHA_HELP)], 0.001),
    "save_result": (Annotated[Path | None, option(options.FILES, SAVE_HELP, metavar="FILE")], None),
}


@options.takes(
    OPTIONS,
    options.QUANTIZATION,
    options.CHAT_OR_RAW,
    options.sampling("n", "logprobs", "skip_special_tokens", max_tokens=64, seed=0, temperature=1.0),
    options.machine(also=("max_num_seqs",)),
)
def check(ctx: typer.Context) -> None:
    """Check that speculation does not change the text: exit status 0 if it does not, 1 if it does.

    Greedy and seeded answers with and without the drafter, token for token. With
    --acceptance rejection or block, also the distribution of many samples.

    paceline check --drafter ngram
    paceline check --drafter path/to/draft --acceptance rejection
    """
    from paceline.bench.prompts import read_questions

    chosen = ctx.params
    saved: Path | None = chosen["save_result"]
    if saved is not None and (saved.suffix != ".json" or saved.exists()):
        raise OptionError(f"--save-result {saved} is not allowed; give the name of a new file that ends in .json")
    prompting.check(chosen["chat"], chosen["prompt_template"])
    config = loading.read_drafter(chosen["drafter"] or ["ngram"], chosen)
    if config is None:
        raise OptionError("--drafter none drafts nothing, so there is nothing to check; name a drafter")
    questions = read_questions(chosen["dataset_path"], chosen["num_prompts"], chosen["demo"])
    found = run(chosen, config, questions)
    if saved is not None:
        save(found, saved, chosen)
    show(found, Console())
    if not found.same:
        raise typer.Exit(DIFFERENT)


def run(chosen: dict[str, Any], config: Any, questions: Any) -> Found:
    from paceline.bench import check as bench
    from paceline.bench.measured import Variant

    params = loading.read_params(chosen)
    # Greedy answers may not find pages that one without the drafter computed; samples share theirs (`bench.check`).
    llm = loading.load(chosen, None, prefix_caching=False)
    loading.fetch_known(loading.draft_models(config), chosen["accept_licence"])
    plan = measuring.make_plan(llm, questions, {**chosen, "rounds": 1}, params, [])
    sizes = {name: chosen[name] for name in ("contexts", "samples", "depth", "alpha")}
    asked = bench.Asked(plan.names, plan.prompts, params, Variant("drafted", config), **sizes)
    with bar() as tell:
        return bench.check(llm, asked, tell)


@contextmanager
def bar() -> Iterator[Any]:
    """What is being done, and how much of it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    look: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, refresh_per_second=2, **look) as progress:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield tell


def save(found: Found, path: Path, chosen: dict[str, Any]) -> None:
    from paceline.bench import kinds, results

    results.write(path, kinds.record_check(found, measuring.typed(), chosen))


def show(found: Found, console: Console) -> None:
    plain: Any = {"markup": False, "highlight": False, "soft_wrap": True}
    for setting in found.exact:
        for line in tell_exact(setting):
            console.print(line, **plain)
    if found.distribution is not None:
        for line in tell_distribution(found.distribution):
            console.print(line, **plain)
    said = "The text is the same with and without drafts." if found.same else "The text is NOT the same with drafts."
    console.print(said, style="bold" if found.same else "bold red", **plain)


def tell_exact(found: Exact) -> Iterator[str]:
    same = found.answers - len(found.divergences)
    yield (
        f"{found.setting}: {same} of {found.answers} answers ({found.tokens} tokens) are plain decoding's, token for "
        f"token; {found.accepted} of {found.drafted} drafts were accepted"
    )
    for one in found.divergences:
        yield (
            f"  {one.prompt}, token {one.position}: {one.got} instead of {one.expected}; the target's two best were "
            f"{one.margin:.5f} apart there" + (" (a tie that rounding decides)" if one.margin < 1e-3 else "")
        )


def tell_distribution(found: Distribution) -> Iterator[str]:
    yield (
        f"{found.rule}: {found.samples} samples after {found.contexts} texts, {found.tokens} tokens in {found.tests} "
        f"G-tests; {found.accepted} of {found.drafted} drafts were accepted"
    )
    yield f"  smallest p times the number of tests: {found.p:.3g}; different is what lies below {found.alpha:g}"
    if found.bias is not None:
        alone = "" if found.bias_at_one is None else f", or of {found.bias_at_one:.3f} after the commonest text alone"
        yield f"  a bias of {found.bias:.3f} (total variation) everywhere{alone}, would have been found 99 times in 100"
    if found.bias_in_ranks is not None:
        ranks = f"(ranks: p = {found.ranks:.3g})"
        yield f"  so would one of {found.bias_in_ranks:.3f} in how often likely tokens are said {ranks}"
    for one in found.odd:
        yield (
            f"  after {one.after}: {one.token} came {one.counted} times in {one.samples}, expected {one.expected:.1f} "
            f"(p = {one.p:.2g})"
        )
