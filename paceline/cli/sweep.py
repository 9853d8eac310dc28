"""`paceline sweep`: how long should drafts be? One drafter at many draft lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import drafters, loading, measuring, options
from paceline.cli.options import option
from paceline.compat.spec import join, split
from paceline.drafters import read_word
from paceline.drafters.table import LENGTH, listed
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.bench.measured import Variant

RESULTS = Path("sweep-results")
DEFAULT_DRAFTER = "ngram"
NUM_PROMPTS = 100  # of a dataset, unless told otherwise
DRAFT_HELP = "A draft model's name or path."
DRAFTER_HELP = f"{listed()}, with options; by default {DEFAULT_DRAFTER}."
LENGTHS_HELP = "The draft lengths: 1..10, 1-10, 1,2,4 or a number."
PROMPTS_HELP = f"Only the first so many prompts; of a dataset {NUM_PROMPTS} by default."
OUTPUT_HELP = f"The folder for report.html and results.json. {measuring.KEPT}"


@options.takes(options.QUANTIZATION, *measuring.OPTIONS)
def sweep(
    ctx: typer.Context,
    draft_model: Annotated[str | None, option(options.DRAFTING, DRAFT_HELP, metavar="NAME")] = None,
    drafter: Annotated[str | None, option(options.DRAFTING, DRAFTER_HELP, metavar="SPEC")] = None,
    num_draft_tokens: Annotated[
        str, option(options.DRAFTING, LENGTHS_HELP, "--num-draft-tokens", "--gamma", metavar="LENGTHS")
    ] = "1..10",
    num_prompts: Annotated[int | None, option(options.PROMPT, PROMPTS_HELP)] = None,
    output: Annotated[Path, option(options.FILES, OUTPUT_HELP)] = RESULTS,
) -> None:
    """Measure one drafter at many draft lengths against plain decoding, and name the best length.

    The speed-up is told in time and in forwards of the target. Beside it stands
    the share of repeated 4-grams: text that goes round in circles is easy to
    draft. Answers end where the model ends them, or see --ignore-eos.
    """
    from paceline.bench.prompts import read_questions

    chosen = ctx.params
    measuring.check_files(chosen)
    params = loading.read_params(chosen)
    variants = read_variants(chosen)
    limit = NUM_PROMPTS if num_prompts is None and chosen["dataset_path"] is not None else num_prompts
    questions = read_questions(chosen["dataset_path"], limit, chosen["demo"])
    measuring.run("sweep", chosen, variants, questions, params)


def read_variants(chosen: dict[str, Any]) -> list[Variant]:
    from paceline.bench import sweep as bench

    model, spec = chosen["draft_model"], chosen["drafter"]
    if model is not None and spec is not None:
        raise OptionError("--draft-model and --drafter were both given; give one")
    name = DEFAULT_DRAFTER if spec is None else spec
    own = {} if model is not None else split(name)[1]
    if LENGTH in own:
        raise OptionError(
            f"--drafter {name!r} fixes {LENGTH}, which is what is swept; give the lengths as "
            f"--num-draft-tokens {own[LENGTH]}"
        )
    if model is None:
        config = drafters.parse(name)
    else:  # the text is a name only: a path may have signs in it that mean something after --drafter
        kind, given = read_word(model)
        name, config = join(kind.word, given), kind.make(given)
    (config,) = drafters.settle("quantization", chosen["drafter_quantization"], [spec or ""], [config])
    return bench.make_variants(name, config, bench.read_lengths(chosen["num_draft_tokens"]))
