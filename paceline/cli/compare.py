"""`paceline compare`: the same prompts plain and with drafters, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import drafters, loading, measuring, options
from paceline.cli.options import option
from paceline.compat.drafter import BY_NGRAM
from paceline.compat.spec import join
from paceline.drafters import read_word
from paceline.drafters.table import LENGTH
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.bench.compare import Variant

RESULTS = Path("compare-results")
DRAFTER_HELP = (
    f"{options.drafter_help()} Once for each to compare with plain decoding, and then only these. By default ngram and "
    "suffix."
)
SPECULATIVE_HELP = "A draft model's name or path: compare plain decoding, this model and ngram."
COUNT_HELP = (
    "The most tokens drafted in a round, where --drafter does not say it; suffix has a default of its own. "
    "--num-draft-tokens is the same option."
)
OUTPUT_HELP = "The folder for report.html, results.json and compare.png."
SAVE_HELP = "Write the results to this file too; its name must end in .json."
NGRAM_FLAGS = ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min")


@options.takes(options.QUANTIZATION, *measuring.OPTIONS)
def compare(
    ctx: typer.Context,
    drafter: Annotated[list[str] | None, option(options.DRAFTING, DRAFTER_HELP, metavar="SPEC")] = None,
    speculative_model: Annotated[str | None, option(options.DRAFTING, SPECULATIVE_HELP, metavar="NAME")] = None,
    num_speculative_tokens: Annotated[
        int, option(options.DRAFTING, COUNT_HELP, "--num-speculative-tokens", "--num-draft-tokens")
    ] = 5,
    ngram_prompt_lookup_max: Annotated[
        int, option(options.DRAFTING, "The most tokens the ngram drafter looks up.")
    ] = 3,
    ngram_prompt_lookup_min: Annotated[int, option(options.DRAFTING, "The fewest tokens that have to agree.")] = 1,
    num_prompts: Annotated[int | None, option(options.PROMPT, "Only the first so many prompts.")] = None,
    output: Annotated[Path, option(options.FILES, OUTPUT_HELP)] = RESULTS,
    save_output: Annotated[Path | None, option(options.FILES, SAVE_HELP, metavar="NAME.json")] = None,
) -> None:
    """Measure plain decoding against drafters on the same prompts, and check that the text is the same.

    With nothing given: our own prompts, the smallest model, ngram and suffix; a minute or so.
    """
    from paceline.bench.prompts import read_questions

    chosen = ctx.params
    measuring.check_files(chosen)
    params = loading.read_params(chosen)
    variants = read_variants(chosen, {name for name in chosen if _is_given(ctx, name)})
    questions = read_questions(chosen["dataset_path"], num_prompts, chosen["demo"])
    measuring.run("compare", chosen, variants, questions, params)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def read_variants(chosen: dict[str, Any], given: set[str]) -> list[Variant]:
    """The drafters to compare; `given` are the options that were typed rather than left at their defaults."""
    from paceline.bench.compare import Variant

    model, count = chosen["speculative_model"], chosen["num_speculative_tokens"]
    if chosen["drafter"] and model is not None:
        spec = join("draft", {"model": model, LENGTH: count})
        raise OptionError(f"--speculative-model and --drafter were both given; write the model as --drafter {spec}")
    specs = list(chosen["drafter"] or default_drafters(chosen, given))
    configs = [drafters.parse(spec) for spec in specs]
    if chosen["drafter"]:
        beside = {LENGTH: "num_speculative_tokens", "max_match": NGRAM_FLAGS[0], "min_match": NGRAM_FLAGS[1]}
        for name, flag in beside.items():
            configs = drafters.settle(name, chosen[flag] if flag in given else None, specs, configs)
        if NGRAM_FLAGS[0] in given:  # the shortest match is then this command's default, too
            configs = drafters.settle("min_match", chosen[NGRAM_FLAGS[1]], specs, configs, quiet=True)
    configs = drafters.settle("quantization", chosen["drafter_quantization"], specs, configs)
    return [Variant(spec, config) for spec, config in zip(specs, configs)]


def default_drafters(chosen: dict[str, Any], given: set[str]) -> list[str]:
    """A draft model and ngram where one is named, else ngram and suffix; as --drafter would have them."""
    model, count = chosen["speculative_model"], chosen["num_speculative_tokens"]
    longest, shortest = (chosen[name] for name in NGRAM_FLAGS)
    ngram = join("ngram", {"max_match": longest, "min_match": shortest, LENGTH: count})
    if model is None:
        own = {LENGTH: count} if "num_speculative_tokens" in given else {}  # else the drafter's default
        return [ngram, join("suffix", own)]
    if model in BY_NGRAM:
        return [ngram]
    kind, named = read_word(model)
    return [join(kind.word, {**named, LENGTH: count}), ngram]
