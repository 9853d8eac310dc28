"""`paceline generate`: one prompt in, its text out as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli import options
from paceline.errors import OptionError
from paceline.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.outputs import CompletionOutput

DRAFTER_HELP = (
    "none, ngram, suffix or a draft model, with options as in ngram:max_match=3,min_match=1; several are asked in that "
    "order."
)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; else --file, else standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: options.Model = DEFAULT_MODEL,
    drafter: Annotated[list[str] | None, typer.Option(help=DRAFTER_HELP)] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="The most tokens drafted in a round.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 256,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this share; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep so many of the likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    chat: options.Chat = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say afterwards what it took, on standard error.")] = False,
    kernels: options.Kernels = "auto",
    quantization: options.Quantization = None,
    drafter_quantization: options.DrafterQuantization = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Complete a prompt, or answer it where the model has a chat template, and write the text as it comes."""
    from paceline.cli import drafters, prompting
    from paceline.llm import LLM
    from paceline.params import SamplingParams

    text = read_text(prompt, file)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    configs = [drafters.with_num_draft_tokens(drafters.parse(spec), num_draft_tokens) for spec in drafter or ()]
    configs = [drafters.with_quantization(config, drafter_quantization) for config in configs]
    combined = drafters.combine(configs)
    engine = {"max_num_seqs": 1, "prefix_caching": False, "kernels": kernels, "quantization": quantization}
    llm = LLM(model, combined, dtype=dtype, device=device, **engine)
    asked = prompting.to_prompt(llm, text, chat)
    start, output = time.perf_counter(), None
    try:
        for chunk in llm.stream({"prompt": asked.text, "prompt_token_ids": asked.ids}, params):
            output = chunk.output or output
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write("\n")  # the shell's prompt goes below what was written
        raise
    sys.stdout.write("\n")
    assert output is not None
    if output.error is not None:
        raise OptionError(output.error)
    if stats:
        Console(stderr=True).print(describe(output, time.perf_counter() - start), style="dim", soft_wrap=True)


def read_text(prompt: str | None, file: Path | None) -> str:
    """The prompt from wherever it was given."""
    if prompt is not None and file is not None:
        raise OptionError("a prompt and --file were both given; give one")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise OptionError(f"the prompt file {file} cannot be read: {reason}") from None
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise OptionError("no prompt was given; give it as an argument, with --file, or through standard input")
    return sys.stdin.read()


def describe(output: CompletionOutput, seconds: float) -> str:
    """What an answer took, in one line."""
    figures, count = output.stats, len(output.token_ids)
    said = f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s), {figures.rounds} target forwards"
    said += f", {figures.tokens_per_forward:.2f} tokens per forward"
    if sum(figures.proposed):
        said += f", {figures.acceptance:.0%} of drafts accepted"
    return f"{said}; seed {output.seed}; ended by {output.finish_reason}"
