"""`paceline generate`: one prompt in, its text out as it comes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli import loading, options, prompting
from paceline.cli.options import option
from paceline.errors import EMPTY, OptionError

if TYPE_CHECKING:
    from paceline.cli.show import Painter
    from paceline.llm import LLM
    from paceline.outputs import Chunk, CompletionOutput
    from paceline.params import SamplingParams
    from paceline.prompts import Prompt

PROMPT_HELP = "The prompt, in quotes or as words, and below it what is piped in; or --file; else it is asked for."
SHOW_HELP = (
    "Show which drafter gave each token, and which are the target's own, in colours with a legend. Takes "
    "--drafter suffix where none was given."
)
JSON_HELP = "Write one JSON object when all is done: text, token ids, origins, figures."
STATS_HELP = "Say afterwards what it took, on standard error."
FILE_HELP = "Read the prompt from a file."


@options.takes(
    options.CHAT_OR_RAW,
    options.SYSTEM,
    options.DRAFTERS,
    options.sampling(max_tokens=256),
    options.COLOR,
    options.machine(),
)
def generate(
    ctx: typer.Context,
    prompt: Annotated[list[str] | None, typer.Argument(help=PROMPT_HELP, show_default=False, metavar="PROMPT")] = None,
    file: Annotated[Path | None, option(options.PROMPT, FILE_HELP)] = None,
    show_drafts: Annotated[bool, option(options.SHOWING, SHOW_HELP, "--show-drafts")] = False,
    stats: Annotated[bool, option(options.SHOWING, STATS_HELP, "--stats")] = False,
    as_json: Annotated[bool, option(options.SHOWING, JSON_HELP, "--json")] = False,
) -> None:
    """Complete a prompt, or answer it where the model has a chat template, and write the text as it comes.

    paceline generate "Name three fruits."
    paceline generate --file notes.txt --drafter ngram --show-drafts
    cat notes.txt | paceline generate "Summarise:"
    """
    run(ctx.params)


def run(chosen: dict[str, Any]) -> None:
    """From options to text. What can be refused without the model is refused before it is loaded."""
    prompting.check(chosen["chat"], chosen["prompt_template"], chosen["system"])
    words = chosen["prompt"]
    text = prompting.read_text(" ".join(words) if words else None, chosen["file"])
    if not text:
        raise OptionError(EMPTY)
    params = loading.read_params(chosen)
    specs = chosen["drafter"] or (["suffix"] if chosen["show_drafts"] else None)
    config = loading.read_drafter(specs, chosen)
    many = params.n > 1
    llm = loading.load(chosen, config, max_num_seqs=params.n, prefix_caching=many)
    asked = prompting.to_prompt(llm, text, chosen["chat"], chosen["system"])
    start = time.perf_counter()
    if chosen["as_json"]:
        outputs = collect(llm, asked, params)
        told = {"model": chosen["model"], "drafter": specs or [], "prompt": asked.text, "prompt_token_ids": asked.ids}
        told["outputs"] = [asdict(output) for output in outputs]
        sys.stdout.write(json.dumps(told, ensure_ascii=False) + "\n")
    else:
        outputs = write(llm, asked, params, chosen)
    for output in outputs:
        if output.error is not None:
            raise OptionError(output.error)
    tell(outputs, chosen, time.perf_counter() - start, llm.max_model_len - len(asked.ids))


def answers(llm: LLM, asked: Prompt, params: SamplingParams) -> Iterator[Chunk]:
    return llm.stream({"prompt": asked.text, "prompt_token_ids": asked.ids}, params)


def collect(llm: LLM, asked: Prompt, params: SamplingParams) -> list[CompletionOutput]:
    done = [chunk.output for chunk in answers(llm, asked, params) if chunk.output is not None]
    return sorted(done, key=lambda output: output.index)


def write(llm: LLM, asked: Prompt, params: SamplingParams, chosen: dict[str, Any]) -> list[CompletionOutput]:
    """The text on standard output as it comes; of several answers one after the other."""
    from paceline.cli import show

    painter = show.Painter(sys.stdout, chosen["color"] if chosen["show_drafts"] else False)
    if chosen["show_drafts"] and not painter.coloured:
        show.note("note: standard output takes no colours, so --show-drafts shows none; add --color to have them")
    if params.n > 1 and params.greedy:
        show.note(f"note: --n {params.n} answers are all the same at --temperature 0; add --temperature 0.8")
    try:
        outputs = _write_all(llm, asked, params, painter)
    except KeyboardInterrupt:
        painter.end()  # the shell's prompt goes below what was written
        raise
    if painter.coloured:
        kinds = {told.kind for output in outputs for told in output.provenance}
        painter.put("\n".join(["", *painter.legend(kinds), ""]))
    return outputs


def _write_all(llm: LLM, asked: Prompt, params: SamplingParams, painter: Painter) -> list[CompletionOutput]:
    from paceline.pieces import Piece, Pieces

    streams = [Pieces(llm.tokenizer, asked.ids, params.skip_special_tokens) for _ in range(params.n)]
    held: list[list[Piece]] = [[] for _ in streams]
    outputs: dict[int, CompletionOutput] = {}
    headings = iter([f"--- {place} of {params.n}\n" if params.n > 1 else "" for place in range(1, params.n + 1)])
    painter.put(next(headings))
    turn = 0
    for chunk in answers(llm, asked, params):
        stream = streams[chunk.index]
        stream.take(chunk.token_ids, chunk.provenance)
        if chunk.output is not None:
            stream.finish()
            outputs[chunk.index] = chunk.output
        held[chunk.index] += stream.show(chunk.text)
        while turn < params.n:
            painter.write(held[turn])
            held[turn] = []
            if turn not in outputs:
                break
            painter.end()
            painter.put(next(headings, ""))
            turn += 1
    return [outputs[index] for index in sorted(outputs)]


def tell(outputs: list[CompletionOutput], chosen: dict[str, Any], seconds: float, room: int) -> None:
    """What was asked for beside the text, on standard error."""
    console = Console(stderr=True, highlight=False, markup=False)
    for output in outputs:
        if output.logprobs is not None and not chosen["as_json"]:
            console.print(logprob_table(output))
        if chosen["stats"]:
            console.print(describe(output, seconds if len(outputs) == 1 else None), style="dim", soft_wrap=True)
    if chosen["stats"] and len(outputs) > 1:
        together = spent(sum(len(output.token_ids) for output in outputs), seconds)
        console.print(f"{len(outputs)} answers together: {together}", style="dim", soft_wrap=True)
    cut = [len(output.token_ids) for output in outputs if output.finish_reason == "length"]
    if cut and console.is_terminal:
        why = "the model takes no more tokens" if max(cut) >= room else f"cut at --max-tokens {max(cut)}"
        console.print(f"({why})", style="dim")


def describe(output: CompletionOutput, seconds: float | None) -> str:
    """What an answer took, in one line; None: it shared its time with others, and they are told together."""
    figures, count = output.stats, len(output.token_ids)
    said = f"{count} tokens" if seconds is None else spent(count, seconds)
    said += f", {figures.rounds} target forwards, {figures.tokens_per_forward:.2f} tokens per forward"
    if sum(figures.proposed):
        said += f", {figures.acceptance:.0%} of drafts accepted"
        names = [told.drafter for told in output.provenance if told.drafter is not None]
        shares = [f"{name} {names.count(name)}" for name in dict.fromkeys(names)]
        said += f" (tokens by drafter: {', '.join(shares)})" if shares else ""
    return f"{said}; seed {output.seed}; ended by {output.finish_reason}"


def spent(count: int, seconds: float) -> str:
    return f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s)"


def logprob_table(output: CompletionOutput) -> Table:
    """A row for each token: itself, how likely the model found it, and what else it considered."""
    shown = Table("token", "log-probability", "rank", "likeliest", box=None, header_style="bold", pad_edge=False)
    for token, entries in zip(output.token_ids, output.logprobs or ()):
        own = entries[token]
        others = sorted((entry for entry in entries.values()), key=lambda entry: entry.rank)
        text = ", ".join(f"{entry.decoded_token!r} {entry.logprob:.3f}" for entry in others)
        shown.add_row(Text(repr(own.decoded_token)), f"{own.logprob:.4f}", str(own.rank), Text(text))
    return shown
