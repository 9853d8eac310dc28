"""The server as a program: its socket, what it says on the terminal, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from rich.console import Console

from paceline.errors import EngineError, OptionError
from paceline.server.guards import Impatient

GRACE: float = 30  # seconds in which answers under way may end

log = logging.getLogger("paceline")


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
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    engine = app.state.server.engine

    class Announced(uvicorn.Server):
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
            cut = asyncio.get_running_loop().call_later(GRACE, self.cut_off)
            try:
                await super().shutdown(sockets)
            finally:
                cut.cancel()

        def cut_off(self) -> None:
            """Whoever has not read its answer by now will not: uvicorn would cancel the tasks, and show where."""
            left = list(self.server_state.connections)
            log.warning("closed after %g seconds, their answers under way: %d connections", GRACE, len(left))
            for connection in left:
                connection.transport.abort()

    last = int(GRACE) + 5  # if even that is to no avail
    config = uvicorn.Config(
        app, http=Impatient, log_level="warning", timeout_graceful_shutdown=last, access_log=False, lifespan="on"
    )
    server = Announced(config)
    try:
        server.run(sockets=[listener])
    except EngineError:
        if server.should_exit:
            raise KeyboardInterrupt from None
        raise
    finally:
        engine.kill()
