"""Requests under way, told as their updates come: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from paceline.errors import PacelineError
from paceline.prompts import Prompt
from paceline.server.answers import Choice, Form, encode, usage
from paceline.server.engine import Stream
from paceline.server.mistakes import Mistake, mistake_of


@dataclass
class Asked:
    """A request under way: a stream and the choices of each prompt."""

    form: Form
    prompts: list[Prompt]
    streams: list[Stream]
    choices: list[list[Choice]] = field(default_factory=list)

    def usage(self) -> dict[str, Any]:
        tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return usage(tokens, [choice.stats for listed in self.choices for choice in listed])

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


async def tell_whole(asked: Asked) -> dict[str, Any]:
    async def take(stream: Stream, choices: list[Choice]) -> None:
        async for update in stream:
            choices[update.index].take(update)

    await asyncio.gather(*map(take, asked.streams, asked.choices))
    listed = [choice for choices in asked.choices for choice in choices]
    wrong = next((choice.error for choice in listed if choice.finish == "error"), None)
    if wrong is not None:
        raise Mistake(400, wrong)
    whole = {**asked.form.head(False), "choices": [choice.whole() for choice in listed], "usage": asked.usage()}
    if asked.form.chat and listed[0].prompt_logprobs is not None:
        whole["prompt_logprobs"] = listed[0].prompt_logprobs
    return whole


async def tell_stream(asked: Asked, with_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events. Whoever stops reading closes it, and what is under way is aborted."""
    head = asked.form.head(True)
    more = {"usage": None} if with_usage else {}
    try:
        async for number, update in merged(asked.streams):
            choice = asked.choices[number][update.index]
            told = choice.take(update)
            if choice.finish == "error":
                raise Mistake(400, choice.error or "the request ended with an error")
            yield event({**head, "choices": [told], **more})
        if with_usage:
            yield event({**head, "choices": [], "usage": asked.usage()})
    except (Mistake, PacelineError) as error:
        wrong = error if isinstance(error, Mistake) else mistake_of(error)
        yield event(wrong.body())
    finally:
        asked.close()
    yield b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


async def merged(streams: list[Stream]) -> AsyncIterator[tuple[int, Any]]:
    """The updates of several streams as they come, each with its stream's number."""
    if len(streams) == 1:  # most requests: no task for each update
        async for update in streams[0]:
            yield 0, update
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                if (told := task.result()) is not None:
                    waiting[asyncio.ensure_future(anext(streams[number], None))] = number
                    yield number, told
    finally:
        for task in waiting:
            task.cancel()


async def unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result; where the client goes away first, the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Mistake(499, "the client has gone")
        return task.result()
    finally:
        task.cancel()
        left.cancel()
