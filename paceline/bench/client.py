"""One streamed answer of any OpenAI server, with the time of every piece of it; and what such a server may also tell.

Knows HTTP, and the fields that servers are known to send. Must not know arrivals, datasets or figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.errors import OptionError, PacelineError, first_line

clock = time.perf_counter
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What a server may not know; it is left out where one refuses it.
OPTIONAL = ("stream_options", "ignore_eos")


@dataclass(frozen=True)
class Ask:
    """What is sent: a text, or a conversation, and at most how many tokens are to come."""

    prompt: str
    max_tokens: int
    messages: list[dict[str, str]] | None = None  # None: the prompt is one user's message
    prompt_tokens: int | None = None  # where they were counted


@dataclass
class Reply:
    """What came of it. Times are seconds; `error` is a sentence, and then no other figure counts."""

    ask: Ask
    start: float = 0.0  # since the run began
    seconds: float = 0.0
    first: float | None = None  # to the first piece
    gaps: list[float] = field(default_factory=list)  # from piece to piece
    text: str = ""
    usage: dict[str, Any] | None = None
    error: str | None = None

    @property
    def num_pieces(self) -> int:
        return 0 if self.first is None else 1 + len(self.gaps)


@dataclass
class Server:
    """Where to ask, and how: a base address without /v1, a route, a model's name, what goes along with each request."""

    base_url: str
    route: str = COMPLETIONS
    model: str | None = None
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # fields this server refuses
    timeout: float = 600.0

    def open(self) -> httpx.AsyncClient:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=self.timeout, limits=unlimited)

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": ask.max_tokens, "stream": True}
        if self.route == CHAT:
            body["messages"] = ask.messages or [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        body |= {"stream_options": {"include_usage": True}, **self.extra}
        return {name: value for name, value in body.items() if name not in self.left_out}


async def send(client: httpx.AsyncClient, server: Server, ask: Ask) -> Reply:
    """Ask, and listen to the end; whatever goes wrong is the reply's error."""
    reply, begun = Reply(ask), clock()
    last = begun
    try:
        async with client.stream("POST", server.route, json=server.body(ask)) as response:
            if response.status_code != 200:
                reply.error = _refusal(response.status_code, await response.aread())
                return reply
            async for event in _events(response):
                if "error" in event:
                    reply.error = str(event["error"])
                    return reply
                reply.usage = event.get("usage") or reply.usage
                text = _text(event)
                if text:
                    now = clock()
                    if reply.first is None:
                        reply.first = now - begun
                    else:
                        reply.gaps.append(now - last)
                    last, reply.text = now, reply.text + text
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reply.error = f"the answer could not be read: {first_line(error)}"
    reply.seconds = clock() - begun
    if reply.error is None and reply.first is None:
        reply.error = "the answer had no text"
    return reply


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The stream's events; comments and blank lines between them are nothing."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            told = line.removeprefix("data:").strip()
            if told == "[DONE]":
                return
            yield json.loads(told)


def _text(event: dict[str, Any]) -> str:
    parts = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        parts.append(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
    return "".join(parts)


def _refusal(status: int, body: bytes) -> str:
    """What the server said, in a sentence."""
    said = body.decode(errors="replace").strip()
    try:
        told = json.loads(said)
        found = told.get("error", told.get("detail", told))
        said = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    return f"HTTP {status}: {said[:300]}"


async def settle(client: httpx.AsyncClient, server: Server, ask: Ask) -> None:
    """Find the model's name where none was given, and what the server refuses to be told; raises where none answers."""
    if server.model is None:
        server.model = await _first_model(client, server)
    reply = await send(client, server, ask)
    for name in OPTIONAL:
        if reply.error is None or not reply.error.startswith(("HTTP 400", "HTTP 422")):
            break
        if name in server.body(ask):
            server.left_out.append(name)
            reply = await send(client, server, ask)
    if reply.error is not None:
        raise PacelineError(f"{server.base_url}{server.route} did not answer a first request: {reply.error}")


async def _first_model(client: httpx.AsyncClient, server: Server) -> str:
    try:
        response = await client.get("/v1/models")
        if response.status_code in (401, 403):
            raise OptionError(f"{server.base_url} wants a key, or another one: give --api-key KEY")
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise OptionError(f"{server.base_url} does not answer: {first_line(error) or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise OptionError(f"{server.base_url}/v1/models names no model; give --model") from None


async def post(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """What a route answers; None where a server does not have it."""
    try:
        response = await client.post(route, json=body)
        told = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return told if isinstance(told, dict) else None


# Counters of /metrics, ours and vLLM's: what was drafted, what was accepted, both by position where it is told.
DRAFTED = ("paceline_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
ACCEPTED = ("paceline_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


async def read_counters(client: httpx.AsyncClient) -> dict[str, float]:
    """drafted and accepted, and accepted.N by position from 1; empty where the server counts none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return {}
    return parse_counters(response.text) if response.status_code == 200 else {}


def parse_counters(text: str) -> dict[str, float]:
    """From Prometheus's text."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare, _, labels = name.partition("{")
        try:
            number = float(value)
        except ValueError:
            continue
        for told, names in (("drafted", DRAFTED), ("accepted", ACCEPTED)):
            if bare in names:
                found[told] = found.get(told, 0.0) + number
        if bare == BY_POSITION or bare == ACCEPTED[0] or bare == DRAFTED[0]:
            place = _position(labels) + (bare == BY_POSITION)  # vLLM counts from 0
            key = f"{'drafted' if bare == DRAFTED[0] else 'accepted'}.{place}"
            found[key] = found.get(key, 0.0) + number
    return found


def _position(labels: str) -> int:
    _, _, after = labels.partition('position="')
    digits = after.partition('"')[0]
    return int(digits) if digits.isdigit() else 0
