"""From a command's options to what the library takes: a model on its way up, a drafter, sampling parameters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from paceline.cli import drafters, options
from paceline.drafters.table import LENGTH
from paceline.engine.options import EngineOptions
from paceline.errors import FetchError
from paceline.models import catalog
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM


def read_params(chosen: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among a command's options."""
    return SamplingParams(**options.read(SamplingParams, chosen))


def read_drafter(specs: list[str] | None, chosen: Mapping[str, Any], quiet: bool = False) -> Any:
    """What `--drafter`, given any number of times, means to one engine; None: plain decoding.

    quiet: whoever asks for other drafters later on is not told again what does not apply to these.
    """
    named = specs or []
    configs = [drafters.parse(spec) for spec in named]
    configs = drafters.settle(LENGTH, chosen.get(LENGTH), named, configs, quiet)
    return drafters.combine(drafters.settle("quantization", chosen.get("drafter_quantization"), named, configs, quiet))


def load(chosen: Mapping[str, Any], drafter: Any, **fixed: Any) -> LLM:
    """The model that the options name, with a sign of life on the terminal."""
    from paceline.llm import LLM

    engine = {**options.read(EngineOptions, {**chosen, "seed": None}), **fixed}  # a command's seed is its request's
    EngineOptions(**engine)  # what it refuses is refused before anything is fetched
    known = catalog.find(chosen["model"])
    model = chosen["model"] if known is None else known.name
    fetch_known([model, *draft_models(drafter)], chosen["accept_licence"])
    with waiting(f"loading {model}", model):
        return LLM(model, drafter, **engine)


def draft_models(drafter: Any) -> list[str]:
    """The names of models that a drafter's config brings along."""
    configs = getattr(drafter, "configs", [drafter])
    return [config.model for config in configs if isinstance(getattr(config, "model", None), str)]


def waiting(text: str, model: str) -> contextlib.AbstractContextManager[Any]:
    """A turning sign on a terminal; not where the hub shows bars of its own."""
    if catalog.find(model) is None and not os.path.exists(os.path.expanduser(model)):
        return contextlib.nullcontext()
    return Console(stderr=True).status(Text(text))


def fetch_known(names: list[str], accept: bool = False) -> None:
    """Bring what the catalog has of these before anything else shows progress."""
    for name in names:
        if catalog.find(name) is not None:
            fetch(name, accept=accept)


def fetch(name: str, renew: bool = False, accept: bool = False) -> Path:
    """A model from the catalog; where no source answers, what to do without a network.

    accept: its licence, where that must be accepted. Without it whoever sits at a terminal is asked.
    """
    if not catalog.is_accepted(name) and catalog.cached_path(name) is None and (accept or _consents(name)):
        catalog.accept(name)
    try:
        return catalog.ensure(name, renew=renew)
    except FetchError as error:
        known = catalog.find(name)
        if known is None or "could not be fetched" not in str(error):
            raise
        place = catalog.home_of(known) / known.filename
        raise FetchError(
            f"{error}, or copy {known.filename} from a machine that has it (paceline models says where) to {place}"
        ) from None


def _consents(name: str) -> bool:
    """Ask at a terminal; False where there is none, and the catalog says what to type."""
    known = catalog.find(name)
    if known is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{catalog.licence_of(known)}. Do you accept it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    raise FetchError(f"{known.name} was not fetched: its licence was not accepted")
