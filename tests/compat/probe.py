"""A command that takes everything of ours, to see what other systems' flags become."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import fields
from typing import Annotated, Any

import typer

from paceline.cli import drafters
from paceline.cli.command import Command
from paceline.llm import EngineOptions

KNOWN = ["model", "drafter", "num_draft_tokens", *(item.name for item in fields(EngineOptions))]
PROMPT = [5, 17, 42, 5, 17]


def _option(kind: Any) -> Any:
    return Annotated[kind, typer.Option()]


OPTIONS: dict[str, Any] = {
    "drafter": list[str] | None,
    "stop": list[str] | None,
    "stop_token_id": list[int] | None,
    "prefix_caching": bool | None,
    "mla_use_matrix_absorption": bool | None,
    "ignore_eos": bool | None,
    "trust_remote_code": bool | None,
    "enforce_eager": bool | None,
    "model_impl": str | None,
    "load_format": str | None,
    **dict.fromkeys(("model", "dtype", "device", "quantization", "template", "acceptance"), str | None),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "gpu_memory_utilization"), float | None),
    **dict.fromkeys(("num_draft_tokens", "max_tokens", "min_tokens", "top_k", "seed", "max_model_len"), int | None),
    **dict.fromkeys(("max_prompt_len", "max_num_seqs", "block_size", "num_pages", "max_batched_tokens"), int | None),
    "tensor_parallel_size": int | None,
}


ARGUMENT = Annotated[list[str] | None, typer.Argument()]


def make_probe() -> Any:
    def probe(**options: Any) -> None:
        pass

    probe.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(kind))
            for name, kind in OPTIONS.items()
        ]
        + [inspect.Parameter("prompt", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ARGUMENT)]
    )
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(probe)
    return typer.main.get_command(app)


PROBE = make_probe()
CALLED = {"template": "prompt_template", "stop_token_id": "stop_token_ids"}


def type_in(text: str) -> dict[str, Any]:
    """What a command gets from these words, in the library's names; a drafter as its config."""
    context = PROBE.make_context("probe", shlex.split(text))
    given = {name: value for name, value in context.params.items() if value not in (None, ())}
    got = {CALLED.get(name, name): list(v) if isinstance(v, tuple) else v for name, v in given.items()}
    if "drafter" in got:
        (spec,) = got["drafter"]
        got["drafter"] = drafters.parse(spec)
    return got


def shown(value: object, most: int) -> str:
    """A value in a test's name: short, and the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(value).split()))[:most]
