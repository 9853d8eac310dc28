"""From a command's options to what the library takes: a model on its way up, a drafter, sampling parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cli import drafters
from paceline.errors import FetchError
from paceline.models import catalog

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.params import SamplingParams

# How an option is called where the field of the library's dataclass has another name.
SAMPLING_NAMES = {"stop_token_id": "stop_token_ids", "bad_word": "bad_words"}
ENGINE_NAMES = {"template": "prompt_template"}


def read_params(options: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among a command's options."""
    from paceline.params import SamplingParams

    chosen = _fields(SamplingParams, options, SAMPLING_NAMES)
    if "stop" in chosen:
        chosen["stop"] = [text.replace("\\n", "\n").replace("\\t", "\t") for text in chosen["stop"]]
    return SamplingParams(**chosen)


def read_drafter(specs: list[str] | None, options: Mapping[str, Any], quiet: bool = False) -> Any:
    """What `--drafter`, given any number of times, means to one engine; None: plain decoding.

    quiet: whoever asks for other drafters later on is not told again what does not apply to these.
    """
    named = specs or []
    configs = [drafters.parse(spec) for spec in named]
    configs = drafters.settle("num_draft_tokens", options.get("num_draft_tokens"), named, configs, quiet)
    return drafters.combine(drafters.settle("quantization", options.get("drafter_quantization"), named, configs, quiet))


def load(options: Mapping[str, Any], drafter: Any, **fixed: Any) -> LLM:
    """The model that the options name, with a sign of life on the terminal."""
    from paceline.engine.options import EngineOptions
    from paceline.llm import LLM

    known = catalog.find(options["model"])
    model = options["model"] if known is None else known.name
    fetch_known([model, *draft_models(drafter)])
    with waiting(f"loading {model}", model):
        return LLM(model, drafter, **_fields(EngineOptions, options, ENGINE_NAMES), **fixed)


def draft_models(drafter: Any) -> list[str]:
    """The names of models that a drafter's config brings along."""
    configs = getattr(drafter, "configs", [drafter])
    return [config.model for config in configs if isinstance(getattr(config, "model", None), str)]


def waiting(text: str, model: str) -> contextlib.AbstractContextManager[Any]:
    """A turning sign on a terminal; not where the hub shows bars of its own."""
    if catalog.find(model) is None and not Path(model).expanduser().exists():
        return contextlib.nullcontext()
    return Console(stderr=True).status(text)


def fetch_known(names: list[str]) -> None:
    """Bring what the catalog has of these before anything else shows progress."""
    for name in names:
        if catalog.find(name) is not None:
            fetch(name)


def fetch(name: str) -> Path:
    """A model from the catalog; where no source answers, what to do without a network."""
    try:
        return catalog.ensure(name)
    except FetchError as error:
        known = catalog.find(name)
        if known is None or "could not be fetched" not in str(error):
            raise
        place = catalog.cache_dir() / "models" / known.name / known.filename
        raise FetchError(
            f"{error}, or copy {known.filename} from a machine that has it (paceline models says where) to {place}"
        ) from None


def _fields(kind: type, options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The options that were given and are fields of a dataclass, under the names they have there."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    given = {names.get(name, name): value for name, value in options.items() if value is not None and value != ()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if name in known}
