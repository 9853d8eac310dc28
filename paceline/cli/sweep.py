"""`paceline sweep`: how long should drafts be? One drafter at many draft lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import loading, measuring, options
from paceline.compat.spec import join, split
from paceline.errors import OptionError
from paceline.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.bench.compare import Variant

RESULTS = Path("sweep-results")
DEFAULT_DRAFTER = "ngram:max_match=4,min_match=2"
NUM_PROMPTS = 100  # of a dataset, unless told otherwise
DRAFT_HELP = "A draft model's name or path."
DRAFTER_HELP = f"ngram, suffix or a draft model, with options; by default {DEFAULT_DRAFTER}."
LENGTHS_HELP = "The draft lengths: 1..10, 1-10, 1,2,4 or a number."
PROMPTS_HELP = f"Only the first so many prompts; of a dataset {NUM_PROMPTS} by default."
OUTPUT_HELP = "The folder for report.html and results.json."


def _drafting(text: str, *names: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=options.DRAFTING, metavar=metavar)


def sweep(
    ctx: typer.Context,
    draft_model: Annotated[str | None, _drafting(DRAFT_HELP, "--draft-model", metavar="NAME")] = None,
    drafter: Annotated[str | None, _drafting(DRAFTER_HELP, "--drafter", metavar="SPEC")] = None,
    num_draft_tokens: Annotated[
        str, _drafting(LENGTHS_HELP, "--num-draft-tokens", "--gamma", metavar="LENGTHS")
    ] = "1..10",
    drafter_quantization: options.DrafterQuantization = None,
    demo: measuring.Demo = None,
    dataset_path: measuring.DatasetPath = None,
    num_prompts: Annotated[int | None, typer.Option(help=PROMPTS_HELP, rich_help_panel=options.PROMPT)] = None,
    chat: options.Chat = None,
    template: options.Template = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "--max-new-tokens", help="The most tokens of an answer.", rich_help_panel=options.SAMPLING
        ),
    ] = 128,
    temperature: options.Temperature = 0.0,
    seed: measuring.Seed = 0,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: options.IgnoreEos = False,
    rounds: measuring.Rounds = 1,
    batch_size: measuring.BatchSize = 1,
    output: Annotated[Path, typer.Option(help=OUTPUT_HELP, rich_help_panel=measuring.FILES)] = RESULTS,
    show: measuring.Show = None,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
) -> None:
    """Measure one drafter at many draft lengths against plain decoding, and name the best length.

    The speed-up is told in time and in forwards of the target. Beside it stands
    the share of repeated 4-grams: text that goes round in circles is easy to
    draft. Answers end where the model ends them, or see --ignore-eos.
    """
    from paceline.bench.prompts import read_questions

    measuring.check_files(ctx.params)
    params = loading.read_params(ctx.params)
    variants = read_variants(ctx.params)
    limit = NUM_PROMPTS if num_prompts is None and dataset_path is not None else num_prompts
    measuring.run("sweep", ctx.params, variants, read_questions(dataset_path, limit, demo), params)


def read_variants(chosen: dict[str, Any]) -> list[Variant]:
    from paceline.bench import sweep as bench
    from paceline.cli import drafters
    from paceline.drafters.draft_model import DraftModel

    model, spec = chosen["draft_model"], chosen["drafter"]
    if model is not None and spec is not None:
        raise OptionError("--draft-model and --drafter were both given; give one")
    config: Any
    if model is not None:
        # The text is a name only: a path may have signs in it that mean something after --drafter.
        name, config = join("draft", {"model": model}), DraftModel(model)
    else:
        name = DEFAULT_DRAFTER if spec is None else spec
        options, config = split(name)[1], drafters.parse(name)
        if "num_draft_tokens" in options:
            raise OptionError(
                f"--drafter {name!r} fixes num_draft_tokens, which is what is swept; give the lengths as "
                f"--num-draft-tokens {options['num_draft_tokens']}"
            )
    (config,) = drafters.settle("quantization", chosen["drafter_quantization"], [spec or ""], [config])
    return bench.make_variants(name, config, bench.read_lengths(chosen["num_draft_tokens"]))
