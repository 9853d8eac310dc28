"""`paceline serve`: an OpenAI-compatible server, its engine in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import loading, options
from paceline.cli.options import option
from paceline.engine.options import EngineOptions
from paceline.errors import EngineError, OptionError
from paceline.models import catalog

if TYPE_CHECKING:
    from paceline.llm import LLM

SERVING = "Serving"
NAMES_HELP = "What the model is called in requests; --model's value unless given. May be given several times."
KEY_HELP = "Clients have to send this key."
TEMPLATE_HELP = "A Jinja file, or llama or vicuna, instead of the model's own chat template. --template is the same."
WAITING_HELP = "Answers that may wait beside those computed at once; whoever comes then is told to come again."
HOST_HELP = "The address to listen at. 0.0.0.0 lets other machines in."
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GRACE = 30  # seconds in which answers under way may end

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
def serve(ctx: typer.Context) -> None:
    """Serve the model over HTTP as OpenAI does, with a page to try it at the address that is printed.

    paceline serve --drafter ngram
    paceline serve --model smollm2-360m --host 0.0.0.0 --api-key SECRET
    """
    try:
        import fastapi  # noqa: F401 - whether it is there
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"the server needs {error.name}, which is not installed: pip install 'paceline[server]'"
        ) from None
    run(ctx.params)


def run(chosen: dict[str, Any]) -> None:
    from paceline.server.app import Settings, create
    from paceline.server.engine import EngineProcess

    config = loading.read_drafter(chosen["drafter"], chosen)
    engine = options.read(EngineOptions, chosen)
    EngineOptions(**engine)  # what it refuses is refused before anything is fetched
    known = catalog.find(chosen["model"])
    model = chosen["model"] if known is None else known.name
    loading.fetch_known([model, *loading.draft_models(config)])
    names = tuple(chosen["served_model_name"] or (model,))
    settings = Settings(
        model, names, chosen["api_key"], max_waiting=chosen["max_waiting"], chat_template=chosen["chat_template"]
    )
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


def listen(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded: a port that is taken is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OptionError(f"--host {host} --port {port} cannot be listened at: {error.strerror or error}") from None
    return listener


def answer(app: Any, listener: socket.socket, host: str, model: str) -> None:
    """Until Ctrl-C or SIGTERM; then answers under way may end."""
    import uvicorn

    from paceline.server.guards import Impatient

    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    engine = app.state.server.engine

    class Told(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            if not self.started:  # nothing is under way
                engine.give_up()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: Any = None) -> None:
            with Console(stderr=True).status(f"loading {model}"):
                await app.state.server.start()  # here rather than in the lifespan, which tells a failure by a traceback
            await super().startup(sockets)
            if self.started:
                Console(stderr=True).print(
                    f"serving {model} at {address} (page) and {address}/v1 (OpenAI)", highlight=False, soft_wrap=True
                )

        async def shutdown(self, sockets: Any = None) -> None:
            app.state.server.draining = True
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app, http=Impatient, log_level="warning", timeout_graceful_shutdown=GRACE, access_log=False, lifespan="on"
    )
    server = Told(config)
    try:
        server.run(sockets=[listener])
    except EngineError:
        if server.should_exit:
            raise KeyboardInterrupt from None
        raise
    finally:
        engine.kill()
