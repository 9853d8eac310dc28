"""A server in a thread of the test's process, its engine in a process of its own, on a port that is free."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from paceline.server.app import Server, Settings, create
from paceline.server.engine import EngineProcess
from paceline.server.guards import Impatient
from tests.server.building import build

NAME = "tiny"
PATIENCE = 180.0  # seconds; nothing that works takes so long

# Programs spawn their engine's process, which imports for seconds (tests/server/test_command.py). Here it is forked
# from one process that has imported all of this.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "paceline.llm",
        "paceline.kernels.cpu.native",
        "paceline.server.runtime",
        "jinja2.sandbox",
        "safetensors.torch",
        "tokenizers",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.configuration_llama",
    ]
)


@dataclass
class Served:
    address: str
    server: Server

    def openai(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", **{**CLIENT, **more})

    def openai_async(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.address}/v1", **{**CLIENT, **more})

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        given = {"json": body} if body is not None else {}
        return httpx.post(self.address + path, timeout=PATIENCE, **given, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.address + path, timeout=PATIENCE, **more)

    def metric(self, name: str, labels: str = "") -> float:
        """A figure's value, summed over its labels or those that are named; 0 where there is none."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if labels in line)

    def connect(self) -> socket.socket:
        host, _, port = self.address.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), PATIENCE)


CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}


def until(holds: Callable[[], Any], what: str) -> None:
    """Wait for what must come, however slow the machine."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"it did not come to be: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    folder: Path, drafter: Any = None, settings: dict[str, Any] | None = None, make: Any = None, **options: Any
) -> Iterator[Served]:
    """make: builds the LLM from the folder, the drafter and the options."""
    chosen = Settings(str(folder), (NAME, "other"), **(settings or {}))
    engine = EngineProcess(functools.partial(make or build, str(folder), drafter, options))
    engine._context = FORKED  # type: ignore[assignment]
    app = create(chosen, engine)
    config = uvicorn.Config(app, port=0, http=Impatient, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        until(lambda: runner.started or not thread.is_alive(), "a server")
        assert runner.started, "the server ended"
        port = runner.servers[0].sockets[0].getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", app.state.server)
    finally:
        runner.should_exit = True
        thread.join(PATIENCE)
