"""An OpenAI server of a few lines, that can be told to behave like servers that are not ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """pieces: of every answer. refused: fields that get a 422. usage: whether tokens are counted."""

    pieces: tuple[str, ...] = ("a ", "line ", "of ", "riders")
    refused: tuple[str, ...] = ()
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 7, "completion_tokens": 6})
    fails: frozenset[int] = frozenset()  # requests, by their number, that get a 500
    breaks: frozenset[int] = frozenset()  # whose stream holds an error
    tokenizes: bool = False
    metrics: tuple[str, ...] = ()  # the texts of /metrics, one after the other
    hold: threading.Event | None = None  # answers wait for it, all but the first
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    metrics_read: int = 0


def make_handler(behaviour: Behaviour) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *ignored: Any) -> None:
            pass

        def answer(self, status: int, content: Any) -> None:
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer(200, {"data": [{"id": "tiny"}]})
            elif self.path == "/metrics" and behaviour.metrics:
                number = min(behaviour.metrics_read, len(behaviour.metrics) - 1)
                behaviour.metrics_read += 1
                self.answer(200, behaviour.metrics[number])
            else:
                self.answer(404, {"error": {"message": "not here"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path in ("/tokenize", "/detokenize"):
                self.spell(body)
                return
            number = len(behaviour.bodies)
            behaviour.bodies.append(body)
            behaviour.paths.append(self.path)
            behaviour.headers.append(dict(self.headers))
            unknown = next((name for name in behaviour.refused if name in body), None)
            if unknown is not None:
                self.answer(422, {"detail": f"{unknown} is not known"})
            elif number in behaviour.fails:
                self.answer(500, {"error": {"message": "no room"}})
            else:
                self.stream(body, number)

        def spell(self, body: dict[str, Any]) -> None:
            if not behaviour.tokenizes:
                self.answer(404, {})
            elif self.path == "/tokenize":
                self.answer(200, {"tokens": [ord(letter) for letter in body["prompt"]]})
            else:
                self.answer(200, {"prompt": "".join(map(chr, body["tokens"]))})

        def stream(self, body: dict[str, Any], number: int) -> None:
            if behaviour.hold is not None and number:
                behaviour.hold.wait(30)
            self.send_response(200)
            self.end_headers()
            chat = "messages" in body
            lines = [{"choices": [{"delta": {"content": text}} if chat else {"text": text}]} for text in self.said()]
            if number in behaviour.breaks:
                lines[1:] = [{"error": {"message": "the engine failed"}}]
            elif "stream_options" in body and behaviour.usage is not None:
                lines.append({"choices": [], "usage": behaviour.usage})
            for line in lines:
                self.wfile.write(f": nothing\n\ndata: {json.dumps(line)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def said(self) -> tuple[str, ...]:
            return behaviour.pieces

    return Handler


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(behaviour))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
