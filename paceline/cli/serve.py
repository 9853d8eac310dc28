"""`paceline serve`: an OpenAI-compatible server, its engine in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import loading, options
from paceline.cli.command import is_given, need
from paceline.cli.options import option
from paceline.engine.options import EngineOptions
from paceline.errors import OptionError
from paceline.models import catalog

if TYPE_CHECKING:
    from paceline.llm import LLM

SERVING = "Serving"
NAMES_HELP = "What the model is called in requests; --model's value unless given. May be given several times."
KEY_HELP = "Clients have to send this key."
TEMPLATE_HELP = "A Jinja file, or llama or vicuna, instead of the model's own chat template. --template is the same."
WAITING_HELP = "Answers that may wait beside those computed at once; whoever comes then is told to come again."
MODEL_HELP = "The model to serve; --model says the same."
HOST_HELP = "The address to listen at. 0.0.0.0 lets other machines in."
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NEEDED = ("fastapi", "uvicorn", "prometheus_client")

OPTIONS: options.Group = {
    "host": (Annotated[str, option(SERVING, HOST_HELP)], "127.0.0.1"),
    "port": (
        Annotated[int, option(SERVING, "The port to listen at; 0 takes any that is free.", min=0, max=65535)],
        8000,
    ),
    "served_model_name": (Annotated[list[str] | None, option(SERVING, NAMES_HELP, metavar="NAME")], None),
    "api_key": (Annotated[str | None, option(SERVING, KEY_HELP, metavar="KEY")], None),
    "chat_template": (
        Annotated[str | None, option(SERVING, TEMPLATE_HELP, "--chat-template", "--template", metavar="FILE")],
        None,
    ),
    "max_waiting": (Annotated[int, option(SERVING, WAITING_HELP, min=0)], 256),
}


@options.takes(OPTIONS, options.DRAFTERS, options.machine(also=("max_num_seqs", "prefix_caching", "seed")))
def serve(
    ctx: typer.Context,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
) -> None:
    """Serve the model over HTTP as OpenAI does, with a page to try it at the address that is printed.

    paceline serve --drafter ngram
    paceline serve gemma3-270m --host 0.0.0.0 --api-key SECRET
    """
    need("the server", *NEEDED)
    if named is not None and is_given(ctx, "model") and ctx.params["model"] != named:
        raise OptionError(f"{named!r} and --model {ctx.params['model']} were both given; name one model")
    run({**ctx.params, **({} if named is None else {"model": named})})


def run(chosen: dict[str, Any]) -> None:
    from paceline.server.app import Settings, create
    from paceline.server.engine import EngineProcess
    from paceline.server.program import answer, listen

    config = loading.read_drafter(chosen["drafter"], chosen)
    engine = options.read(EngineOptions, chosen)
    EngineOptions(**engine)  # what it refuses is refused before anything is fetched
    known = catalog.find(chosen["model"])
    model = chosen["model"] if known is None else known.name
    loading.fetch_known([model, *loading.draft_models(config)], chosen["accept_licence"])
    names = tuple(chosen["served_model_name"] or (model,))
    told = ("api_key", "max_waiting", "chat_template", "trust_remote_code", "load_format")
    own = {name: chosen[name] for name in told}
    settings = Settings(model, names, **own)
    if chosen["host"] not in LOOPBACK and chosen["api_key"] is None:
        logging.getLogger("paceline").warning(
            "--host %s without --api-key: whoever can reach this machine can use the server", chosen["host"]
        )
    listener = listen(chosen["host"], chosen["port"])
    with contextlib.closing(listener):
        app = create(settings, EngineProcess(functools.partial(build, model, config, engine)))
        answer(app, listener, chosen["host"], model)


def build(model: str, config: Any, engine: dict[str, Any]) -> LLM:
    """In the engine's process."""
    from paceline.llm import LLM

    return LLM(model, config, **engine)
