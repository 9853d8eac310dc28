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
    from paceline.bench.measured import Variant

RESULTS = Path("compare-results")
DRAFTER_HELP = (
    f"{options.drafter_help()} Once for each to compare with plain decoding, and then only these. By default ngram and "
    "suffix."
)
SPECULATIVE_HELP = "A draft model's name or path: compare plain decoding, this model and ngram."
COUNT_HELP = (
    "The most tokens drafted in a round, where --drafter does not say it; else each drafter's own default. "
    "--num-draft-tokens is the same option."
)
MOST_HELP = "The most tokens the ngram drafter looks up."
FEWEST_HELP = "The fewest tokens that have to agree; 1 where only the most are given."
OUTPUT_HELP = f"The folder for report.html, results.json and compare.svg. {measuring.KEPT}"
SAVE_HELP = "Write the results to this file too; its name must end in .json, and it must not be there yet."
# Options beside --drafter, and the field of a drafter each one sets.
BESIDE = {
    "num_speculative_tokens": LENGTH,
    "ngram_prompt_lookup_max": "max_match",
    "ngram_prompt_lookup_min": "min_match",
    "drafter_quantization": "quantization",
}


OPTIONS: options.Group = {
    "drafter": (Annotated[list[str] | None, option(options.DRAFTING, DRAFTER_HELP, metavar="SPEC")], None),
    "speculative_model": (Annotated[str | None, option(options.DRAFTING, SPECULATIVE_HELP, metavar="NAME")], None),
    "num_speculative_tokens": (
        Annotated[int | None, option(options.DRAFTING, COUNT_HELP, "--num-speculative-tokens", "--num-draft-tokens")],
        None,
    ),
    "ngram_prompt_lookup_max": (Annotated[int | None, option(options.DRAFTING, MOST_HELP)], None),
    "ngram_prompt_lookup_min": (Annotated[int | None, option(options.DRAFTING, FEWEST_HELP)], None),
    "num_prompts": (Annotated[int | None, option(options.PROMPT, "Only the first so many prompts.")], None),
    "output": (Annotated[Path, option(options.FILES, OUTPUT_HELP)], RESULTS),
    "save_output": (Annotated[Path | None, option(options.FILES, SAVE_HELP, metavar="NAME.json")], None),
}


@options.takes(OPTIONS, options.QUANTIZATION, *measuring.OPTIONS)
def compare(ctx: typer.Context) -> None:
    """Measure plain decoding against drafters on the same prompts, and check that the text is the same.

    With nothing given: our own prompts, the smallest model, ngram and suffix; a minute or so.
    """
    from paceline.bench.prompts import read_questions

    chosen = ctx.params
    measuring.check_files(chosen)
    params = loading.read_params(chosen)
    variants = read_variants(chosen)
    questions = read_questions(chosen["dataset_path"], chosen["num_prompts"], chosen["demo"])
    measuring.run("compare", chosen, variants, questions, params)


def read_variants(chosen: dict[str, Any]) -> list[Variant]:
    """The drafters to compare, each named as --drafter would have it."""
    from paceline.bench.measured import Variant

    specs = list(chosen["drafter"] or default_drafters(chosen["speculative_model"]))
    if chosen["drafter"] and chosen["speculative_model"] is not None:
        spec = join("draft", {"model": chosen["speculative_model"]})
        raise OptionError(f"--speculative-model and --drafter were both given; write the model as --drafter {spec}")
    configs = [drafters.parse(spec) for spec in specs]
    for flag, name in BESIDE.items():
        configs = drafters.settle(name, chosen[flag], specs, configs)
    if chosen["ngram_prompt_lookup_max"] is not None and chosen["ngram_prompt_lookup_min"] is None:
        configs = drafters.settle("min_match", 1, specs, configs, quiet=True)  # as where these flags come from
    return [Variant(spec, config) for spec, config in zip(specs, configs)]


def default_drafters(model: str | None) -> list[str]:
    """A draft model and ngram where one is named, else ngram and suffix."""
    if model is None:
        return ["ngram", "suffix"]
    if model in BY_NGRAM:
        return ["ngram"]
    kind, named = read_word(model)
    return [join(kind.word, named), "ngram"]
