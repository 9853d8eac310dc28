"""Measurements of a server, of many datasets, and checks, in the one layout (`results` has the head they share).

    serve    server (address, route, model, fields it refused), figures (vLLM's names), acceptance, requests
    offline  cells: dataset, batch_size, temperature, and then prompts and variants as a comparison has them;
             absent: peers that were not measured, and why
    check    same (the verdict), exact and distribution, each null where it was not asked for

Measures nothing, draws nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench import results
from paceline.errors import OptionError

if TYPE_CHECKING:  # what asks servers needs more than what measures here
    from paceline.bench.client import Server
    from paceline.bench.serving import Run

Data = dict[str, Any]
KINDS = ("compare", "sweep", "offline", "serve")  # that a report can show


def record_serving(run: Run, server: Server, command: str, options: Data, percentiles: tuple[float, ...]) -> Data:
    from paceline.bench import serving

    shown = command if server.api_key is None else command.replace(server.api_key, "KEY")
    return {
        **results.head("serve", shown, _without_key(options), run.interrupted),
        "server": {
            "base_url": server.base_url,
            "route": server.route,
            "model": server.model,
            "left_out": server.left_out,
        },
        "figures": serving.figures(run, percentiles),
        "acceptance": serving.acceptance(run),
        "requests": [_record_request(reply, serving.count_tokens(reply)) for reply in run.replies],
    }


def _without_key(options: Data) -> Data:
    """A file of results is passed around."""
    return {name: value for name, value in options.items() if name != "api_key"}


def _record_request(reply: Any, tokens: int) -> Data:
    usage = reply.usage or {}
    return {
        "start": reply.start,
        "prompt_tokens": usage.get("prompt_tokens") or reply.ask.prompt_tokens,
        "output_tokens": tokens,
        "ttft": reply.first,
        "seconds": reply.seconds,
        "gaps": reply.gaps,
        "error": reply.error,
    }


def record_offline(cells: list[Data], absent: dict[str, str], command: str, options: Data, interrupted: bool) -> Data:
    return {**results.head("offline", command, options, interrupted), "cells": cells, "absent": absent}


def record_check(found: Any, command: str, options: Data) -> Data:
    data = results.head("check", command, options, False)
    return {**data, "same": found.same, **{name: value for name, value in asdict(found).items() if name != "same"}}


def read(path: Path) -> Data:
    """A file of results, of any kind a report can show."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not JSON: {str(error)[:100]}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS or "machine" not in data:
        raise OptionError(f"{path} holds no results of paceline {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return dict(data)
