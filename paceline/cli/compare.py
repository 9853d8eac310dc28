"""`paceline compare`: the same prompts plain and with drafters, side by side."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import loading, measuring, options
from paceline.compat.spec import join, split
from paceline.errors import OptionError
from paceline.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.bench.compare import Variant

log = logging.getLogger("paceline")

RESULTS = Path("compare-results")
DRAFTER_HELP = (
    "ngram, suffix or a draft model's name or path, with options as in ngram:max_match=3,min_match=1; once for each to "
    "compare with plain decoding, and then only these. By default ngram and suffix."
)
SPECULATIVE_HELP = "A draft model's name or path: compare plain decoding, this model and ngram."
COUNT_HELP = (
    "The most tokens drafted in a round, where --drafter does not say it; suffix has a default of its own. "
    "--num-draft-tokens is the same option."
)
OUTPUT_HELP = "The folder for report.html, results.json and compare.png."
SAVE_HELP = "Write the results to this file too; its name must end in .json."
NGRAM_FLAGS = ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min")
WITHOUT_EFFECT = ("trust_remote_code", "enforce_eager")


def _drafting(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=options.DRAFTING, **more)


def compare(
    ctx: typer.Context,
    drafter: Annotated[list[str] | None, _drafting(DRAFTER_HELP, metavar="SPEC")] = None,
    speculative_model: Annotated[str | None, _drafting(SPECULATIVE_HELP, metavar="NAME")] = None,
    num_speculative_tokens: Annotated[int, _drafting(COUNT_HELP, "--num-speculative-tokens", "--num-draft-tokens")] = 5,
    ngram_prompt_lookup_max: Annotated[int, _drafting("The most tokens the ngram drafter looks up.")] = 3,
    ngram_prompt_lookup_min: Annotated[int, _drafting("The fewest tokens that have to agree.")] = 1,
    drafter_quantization: options.DrafterQuantization = None,
    demo: measuring.Demo = None,
    dataset_path: measuring.DatasetPath = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Only the first so many prompts.", rich_help_panel=options.PROMPT)
    ] = None,
    chat: options.Chat = None,
    template: options.Template = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: measuring.Seed = 0,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: options.IgnoreEos = False,
    rounds: measuring.Rounds = 1,
    batch_size: measuring.BatchSize = 1,
    output: Annotated[Path, typer.Option(help=OUTPUT_HELP, rich_help_panel=measuring.FILES)] = RESULTS,
    save_output: Annotated[
        Path | None, typer.Option(help=SAVE_HELP, rich_help_panel=measuring.FILES, metavar="NAME.json")
    ] = None,
    show: measuring.Show = None,
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Devices to spread the model over; 1 for now.", rich_help_panel=options.MACHINE)
    ] = 1,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="No effect.", rich_help_panel=options.MACHINE)
    ] = False,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="No effect.", rich_help_panel=options.MACHINE)
    ] = False,
) -> None:
    """Measure plain decoding against drafters on the same prompts, and check that the text is the same.

    With nothing given: our own prompts, the smallest model, ngram and suffix; a minute or so.
    """
    from paceline.bench.prompts import read_questions

    given = {name for name in ctx.params if _is_given(ctx, name)}
    for name in WITHOUT_EFFECT:
        if name in given:
            log.warning("--%s has no effect here", name.replace("_", "-"))
    measuring.check_files(ctx.params)
    params = loading.read_params(ctx.params)
    variants = read_variants(ctx.params, given)
    measuring.run("compare", ctx.params, variants, read_questions(dataset_path, num_prompts, demo), params)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def read_variants(chosen: dict[str, Any], given: set[str]) -> list[Variant]:
    """The drafters to compare; `given` are the options that were typed rather than left at their defaults."""
    from paceline.bench.compare import Variant
    from paceline.cli import drafters

    model, count = chosen["speculative_model"], chosen["num_speculative_tokens"]
    if chosen["drafter"] and model is not None:
        spec = join("draft", {"model": model, "num_draft_tokens": count})
        raise OptionError(f"--speculative-model and --drafter were both given; write the model as --drafter {spec}")
    quantization = chosen["drafter_quantization"]
    if not chosen["drafter"]:
        variants = default_variants(chosen, given)
        names, configs = [one.name for one in variants], [one.drafter for one in variants]
        # These names are made here, so nothing in them was said by the user.
        configs = drafters.settle("quantization", quantization, [""] * len(names), configs)
    else:
        names = with_lookup(list(chosen["drafter"]), chosen, given)
        configs = [drafters.parse(name) for name in names]
        asked = count if "num_speculative_tokens" in given else None
        configs = drafters.settle("num_draft_tokens", asked, names, configs)
        configs = drafters.settle("quantization", quantization, names, configs)
    return [Variant(name, config) for name, config in zip(names, configs)]


def with_lookup(specs: list[str], chosen: dict[str, Any], given: set[str]) -> list[str]:
    """The same drafters, ngram among them with the lengths that --ngram-prompt-lookup-max and -min give it."""
    typed = {name.removeprefix("ngram_prompt_lookup_"): chosen[name] for name in NGRAM_FLAGS if name in given}
    if not any(split(spec)[0] == "ngram" for spec in specs):
        for end, length in typed.items():
            least = {"max": "at most", "min": "at least"}[end]
            log.warning("a match of %s %d tokens applies to none of these drafters and is left out", least, length)
        return specs
    return [_with_lookup(spec, typed, chosen["ngram_prompt_lookup_min"]) for spec in specs]


def _with_lookup(spec: str, typed: dict[str, int], shortest: int) -> str:
    word, options = split(spec)
    if word != "ngram" or not typed:
        return spec
    added = {f"{end}_match": length for end, length in typed.items()}
    for name, length in added.items():
        if options.get(name, str(length)) != str(length):
            raise OptionError(f"--drafter {spec} and {name}={length} contradict each other; give one")
    return join(word, {"min_match": shortest, **added, **options} if "max" in typed else {**added, **options})


def default_variants(chosen: dict[str, Any], given: set[str]) -> list[Variant]:
    """A draft model and ngram where one is named, else ngram and suffix; named as --drafter would have them."""
    from paceline.bench.compare import Variant
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.ngram import NGram
    from paceline.drafters.suffix import Suffix

    model, count = chosen["speculative_model"], chosen["num_speculative_tokens"]
    longest, shortest = (chosen[name] for name in NGRAM_FLAGS)
    options = {"max_match": longest, "min_match": shortest, "num_draft_tokens": count}
    ngram = Variant(join("ngram", options), NGram(count, shortest, longest))
    if model is None:
        own = {"num_draft_tokens": count} if "num_speculative_tokens" in given else {}  # else the drafter's default
        return [ngram, Variant(join("suffix", own), Suffix(**own))]
    if model in ("[ngram]", "ngram"):  # as vLLM writes it where there is no model
        return [ngram]
    return [Variant(join("draft", {"model": model, "num_draft_tokens": count}), DraftModel(model, count)), ngram]
