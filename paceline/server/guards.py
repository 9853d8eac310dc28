"""What keeps one client from holding the server up: bodies that are too large or never come, headers that never end."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.server.answers import encode
from paceline.server.mistakes import Mistake

HEADER_SECONDS = 30.0


class Guards:
    """An ASGI middleware: a body of at most so many bytes, in so many seconds. And HEAD wherever there is GET."""

    def __init__(self, app: Any, max_body: int, body_seconds: float) -> None:
        self._app, self._max_body, self._seconds = app, max_body, body_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the same answer, whose body uvicorn leaves out
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self._seconds)
        except TimeoutError:
            await _refuse(send, 408, f"the request's body did not arrive within {self._seconds:g} seconds")
            return
        except _TooLarge:
            await _refuse(send, 413, f"the request's body is larger than {self._max_body} bytes, which are allowed")
            return
        except _Gone:
            return
        told = False

        async def again() -> Any:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    async def _read(self, scope: Any, receive: Any) -> bytes:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body:
                raise _TooLarge
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise _TooLarge
            if not message.get("more_body", False):
                return b"".join(parts)


class _TooLarge(Exception):
    pass


class _Gone(Exception):
    """The client went away before it had said what it wants."""


async def _refuse(send: Any, status: int, sentence: str) -> None:
    body = encode(Mistake(status, sentence).body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Impatient(H11Protocol):
    """Closes a connection on which a request's headers do not come to an end within HEADER_SECONDS."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._waits is not None:
            self._waits.cancel()

    def _watch(self) -> None:
        """From a request's first byte on, or from the connection's beginning, until its headers are there."""
        if self.conn.their_state is not h11.IDLE:
            if self._waits is not None:
                self._waits.cancel()
            self._waits = None
        elif self._waits is None:
            self._waits = self.loop.call_later(HEADER_SECONDS, self.transport.close)
