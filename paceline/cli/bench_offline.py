"""`paceline bench offline`: datasets × drafters × batch sizes × temperatures, plain decoding and peers among them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import compare, loading, measuring, options, prompting
from paceline.cli.options import option
from paceline.drafters.table import NONE
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.bench.measured import Variant
    from paceline.bench.peers import Peers
    from paceline.bench.prompts import Question
    from paceline.llm import LLM
    from paceline.params import SamplingParams

RESULTS = Path("bench-results")
NUM_PROMPTS = 10
DATASET_HELP = (
    "A .jsonl or .jsonl.gz file with messages, turns, prompt, question or text: Spec-Bench, MT-bench, GSM8K, "
    "HumanEval, alpaca. Once for each; else our own prompts."
)
CATEGORY_HELP = "Each category of a file is a dataset of its own; MT-bench's eight are one."
DRAFTER_HELP = f"{compare.DRAFTER_HELP} {NONE} is plain decoding alone."
PROMPTS_HELP = "Only the first so many prompts of each dataset."
PEERS_HELP = "Measure transformers and llama-cpp-python too, where they are installed; by default they are."
OUTPUT_HELP = f"The folder for report.html and results.json. {measuring.KEPT}"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

OPTIONS: options.Group = {
    **compare.OPTIONS,
    "drafter": (Annotated[list[str] | None, option(options.DRAFTING, DRAFTER_HELP, metavar="SPEC")], None),
    "dataset_path": (Annotated[list[Path] | None, option(options.PROMPT, DATASET_HELP, metavar="FILE")], None),
    "by_category": (Annotated[bool, option(options.PROMPT, CATEGORY_HELP, show_default=False)], False),
    "num_prompts": (Annotated[int, option(options.PROMPT, PROMPTS_HELP)], NUM_PROMPTS),
    "temperature": (
        Annotated[list[float] | None, option(options.SAMPLING, "Once for each to measure; by default 0.")],
        None,
    ),
    "batch_size": (
        Annotated[list[int] | None, option(options.MEASURING, "Prompts at a time; once for each; by default 1.")],
        None,
    ),
    "rounds": (Annotated[int, option(options.MEASURING, measuring.ROUNDS)], 1),
    "peers": (Annotated[bool, option(options.MEASURING, PEERS_HELP, "--peers/--no-peers", show_default=False)], True),
    "output": (Annotated[Path, option(options.FILES, OUTPUT_HELP)], RESULTS),
}


@options.takes(
    OPTIONS,
    options.QUANTIZATION,
    options.CHAT_OR_RAW,
    options.sampling("n", "logprobs", "skip_special_tokens", "temperature", max_tokens=128, seed=0),
    options.machine("acceptance"),
)
def offline(ctx: typer.Context) -> None:
    """Measure datasets with drafters, batch sizes and temperatures, interleaved with plain decoding.

    paceline bench offline --dataset-path mt_bench.jsonl --drafter suffix
    paceline bench offline --batch-size 1 --batch-size 8 --temperature 0.8
    """
    chosen = dict(ctx.params)
    measuring.check_files(chosen)
    sizes, heats = chosen["batch_size"] or [1], chosen["temperature"] or [0.0]
    for name, listed in (("--batch-size", sizes), ("--temperature", heats)):
        if len(set(listed)) < len(listed):
            raise OptionError(f"{name} was given the same value twice; give each once")
    hot = [(heat, loading.read_params({**chosen, "temperature": heat})) for heat in heats]
    variants = read_variants(chosen)
    datasets = read_datasets(chosen["dataset_path"] or [], chosen["num_prompts"], chosen["by_category"])
    prompting.check(chosen["chat"], chosen["prompt_template"])
    run({**chosen, "batch_size": sizes, "temperature": heats}, variants, datasets, hot)


def read_variants(chosen: dict[str, Any]) -> list[Variant]:
    """As `compare` reads them; none stands for plain decoding, which is measured anyway."""
    specs = [spec for spec in chosen["drafter"] or () if spec.strip() != NONE]
    if chosen["drafter"] and not specs:
        return []
    return compare.read_variants({**chosen, "drafter": specs})


def read_datasets(paths: list[Path], limit: int, by_category: bool) -> dict[str, list[Question]]:
    """Questions by the name of where they stand."""
    from paceline.bench.prompts import DEFAULT_DEMO, read_questions

    if not paths:
        return {DEFAULT_DEMO: read_questions(None, limit)}
    found: dict[str, list[Question]] = {}
    for path in paths:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        for question in read_questions(path, None if by_category else limit):
            category = "mt_bench" if question.category in MT_BENCH else question.category
            own = found.setdefault(f"{name}: {category}" if by_category and category else name, [])
            if len(own) < limit:
                own.append(question)
    return found


def run(
    chosen: dict[str, Any],
    variants: list[Variant],
    datasets: dict[str, list[Question]],
    hot: list[tuple[float, SamplingParams]],
) -> None:
    """One batch size after the other, since it is the engine's; in each every dataset at every temperature."""
    from paceline.bench import kinds, results
    from paceline.bench.peers import Peers

    cells: list[dict[str, Any]] = []
    peers = Peers(chosen["peers"])
    interrupted = False
    loading.fetch_known(
        [name for variant in variants for name in loading.draft_models(variant.drafter)], chosen["accept_licence"]
    )
    total = len(chosen["batch_size"]) * len(datasets) * len(hot)
    try:
        for size in chosen["batch_size"]:
            with loading.load(chosen, None, max_num_seqs=size, prefix_caching=False) as llm:
                for (dataset, questions), (heat, params) in itertools.product(datasets.items(), hot):
                    others = with_peers(peers, llm, chosen["model"], params, variants)
                    plan = measuring.make_plan(llm, questions, chosen, params, [*variants, *others])
                    label = f"{len(cells) + 1} of {total}: {dataset}, "
                    result = measuring.measure(llm, plan, Console(stderr=True), label)
                    if result.measured:
                        cell = {"dataset": dataset, "batch_size": size, "temperature": heat}
                        cells.append({**cell, **results.record_figures(result)})
                    if result.interrupted:
                        raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
        if not cells:
            raise
    told = {**chosen, "dataset_path": [str(path) for path in chosen["dataset_path"] or []]}
    finish(kinds.record_offline(cells, peers.absent, measuring.typed(), told, interrupted), chosen)
    if interrupted:
        raise KeyboardInterrupt


def with_peers(peers: Peers, llm: LLM, model: str, params: SamplingParams, variants: list[Variant]) -> list[Variant]:
    """Those that can be asked for the same; they are loaded when first they can."""
    import torch

    from paceline.bench.measured import Variant
    from paceline.bench.peers import Asked
    from paceline.models import loader

    if not peers.can_do(params, llm.options.max_num_seqs):
        return []
    draft = next((name for variant in variants for name in loading.draft_models(variant.drafter)), None)
    with Console(stderr=True).status("loading peers"):
        known = None if draft is None else loader.locate(draft)
        device, threads = llm.engine.target.device, torch.get_num_threads()
        found = peers.find(Asked(loader.locate(model), known, llm.max_model_len, device, threads))
    return [Variant(peer.name, None, peer=peer) for peer in found]


def finish(data: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Tables, and files."""
    from paceline.bench import report, results, runs, runs_page

    console = Console()
    plain: Any = {"markup": False, "highlight": False, "soft_wrap": True}
    for table in runs.rates(data):
        console.print(table)
    console.print(runs.table(runs.read_rows(data, "run")))
    for cell in data["cells"]:
        ours = [row for row in cell["variants"] if not row.get("peer")]
        by_position = report.positions({"kind": "compare", "variants": ours})
        if by_position is not None:
            console.print(runs.describe_cell(cell), style="bold", **plain)
            console.print(by_position)
    for peer, why in data["absent"].items():
        console.print(f"{peer}: {why}", style="dim", **plain)
    if data["interrupted"]:
        console.print("interrupted: what was measured by then is here", style="dim")
    folder = measuring.free_folder(chosen["output"])
    folder.mkdir(parents=True, exist_ok=True)
    page, file = folder / measuring.REPORT, folder / measuring.RESULTS
    page.write_text(runs_page.render({"run": data}), encoding="utf-8")
    file.write_text(results.to_text(data), encoding="utf-8")
    console.print(f"report: {page}", **plain)
    console.print(f"also written: {file}", style="dim", **plain)
