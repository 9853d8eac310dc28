"""`AsyncLLM`: the same engine for callers in an event loop. A thin face over `LLM`, whose insides it may touch.

One background thread does the rounds while there is work and sleeps otherwise. The event loop never waits for it:
prompts are read in other threads, what is to be done to the engine is left as a job, and updates come back as calls
that the loop makes.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Self

import torch

from paceline import compat
from paceline.engine.update import Update
from paceline.errors import EngineError
from paceline.llm import LLM, UNSAID, Asked
from paceline.outputs import Chunk, RequestOutput, Score
from paceline.params import SamplingParams
from paceline.templates import Message, Tools

__all__ = ["AsyncLLM", "Stream"]


class AsyncLLM:
    """An LLM whose calls are awaited. It takes what `LLM` takes; `llm` is the LLM itself, and may be called too.

    Requests of all tasks run in one batch. A task that is cancelled aborts its requests at once.
    """

    def __init__(self, model: Any = UNSAID, drafter: Any = None, tokenizer: Any = None, **options: Any) -> None:
        self.llm = _Waited(model, drafter, tokenizer, **options)
        self._pump = Pump(self.llm)
        self._stop = weakref.finalize(self, self._pump.stop)  # at the latest when Python ends

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ignored: object) -> None:
        await self.close()

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, tools: Tools | None = None, **spellings: Any
    ) -> Stream:
        """`async for` over the text of a prompt or a conversation as it comes. Leaving the loop aborts the request."""
        return Stream(self, lambda: self.llm._ask_one(prompt, sampling_params, tools, spellings))

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, **spellings: Any
    ) -> list[RequestOutput]:
        """Complete one prompt or many: see LLM.generate."""
        compat.read_call(spellings)
        return await self._finish(lambda: self.llm._ask(prompts, sampling_params, spellings))

    async def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Tools | None = None,
        **spellings: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many: see LLM.chat."""
        how = {"tools": tools, **compat.read_call(spellings, chat=True)[1]}
        return await self._finish(lambda: self.llm._ask_chat(messages, sampling_params, how, spellings))

    async def score(self, texts: Any) -> list[Score]:
        """How likely the model finds given texts: see LLM.score."""
        return [Score.of(output) for output in await self._finish(lambda: self.llm._ask_score(texts))]

    async def abort(self, request_id: str) -> None:
        """End a request now: its stream or call ends with finish_reason "abort". Unknown ones are left alone."""
        if not self.llm._closed:
            await asyncio.shield(asyncio.wrap_future(self._pump.post(lambda: self.llm._abort(request_id))))

    async def set_drafter(self, drafter: Any) -> None:
        """Turn speculation on, off (None) or over to another drafter; running requests go on."""
        await asyncio.to_thread(self.llm.set_drafter, drafter)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None if it has none."""
        return self.llm.get_tokenizer()

    async def close(self) -> None:
        """Free weights and cache. Requests under way end with finish_reason "abort"; later calls are refused."""
        await asyncio.to_thread(self.llm.close)
        await asyncio.to_thread(self._stop)

    async def _finish(self, read: Callable[[], list[Asked]]) -> list[RequestOutput]:
        asked = await asyncio.to_thread(read)
        requests: list[Request] = []
        try:
            for one in asked:
                requests.append(Request(self, one, only_ends=True))
            for request in requests:
                while request.left:
                    await request.hear()
            return [one.output() for one in asked]
        finally:
            for request in requests:
                request.leave()


class _Waited(LLM):
    """One whose callers wait for every token: none should wait long for a round that reads another's prompt."""

    def _usual_rows(self, device: torch.device) -> int:
        return min(2048, super()._usual_rows(device))


class Stream(AsyncIterator[Chunk]):
    """One request's chunks. Its prompt is read, and the request queued, when the first is asked for.

    Cancelling the task that waits, `aclose()`, or letting go of the stream aborts the request at once.
    """

    def __init__(self, owner: AsyncLLM, read: Callable[[], Asked]) -> None:
        self._owner, self._read = owner, read
        self._request: Request | None = None
        self._over = False

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._request is None:
                self._request = Request(self._owner, await asyncio.to_thread(self._read))
            update = await self._request.hear()
        except BaseException:
            self._end()
            raise
        self._over = not self._request.left
        return self._request.asked.chunk(update)

    async def aclose(self) -> None:
        """Abort the request, if it still runs."""
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._request is not None:
            self._request.leave()


class Request:
    """A request under way, and its updates on their way to the loop it was made in.

    The engine's books hold this, and not the stream: so a stream that nobody holds any more is known to be left.
    """

    def __init__(self, owner: AsyncLLM, asked: Asked, only_ends: bool = False) -> None:
        self._owner, self.asked = owner, asked
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        self.left = len(asked.samples)  # samples that have not ended, as far as the loop has heard
        queued = owner._pump.post(lambda: owner.llm._add(asked.samples, self, only_ends))
        queued.add_done_callback(self._look)

    def __call__(self, update: Update | BaseException) -> None:
        """Called by whoever did the round."""
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # the loop is closed, and nobody there any more
            self.leave()

    async def hear(self) -> Update:
        """The next update."""
        update = await self._updates.get()
        if isinstance(update, BaseException):
            raise update
        self.left -= update.finished
        return update

    def leave(self) -> None:
        """Nobody waits for it any more. From any thread, and more than once."""
        if self.left:
            with suppress(EngineError):  # closed: it has gone already
                self._owner._pump.post(partial(self._owner.llm._forget, self.asked.samples))
        self.left = 0

    def _look(self, queued: Future[Any]) -> None:
        error = queued.exception()
        if error is not None:
            self(error)


class Pump:
    """The thread that does the rounds, from the first request on; it knows no event loop."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._wake: SimpleQueue[None] = SimpleQueue()  # rung from garbage collectors too, where an Event might hang
        self.asleep = True  # until it is rung
        self._lock = threading.RLock()  # of the two below
        self._thread: threading.Thread | None = None
        self._stopped = False

    def post(self, work: Callable[[], Any]) -> Future[Any]:
        """Leave a job for the thread, which does it before its next round."""
        with self._lock:
            if self._stopped:
                self._llm._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline", daemon=True)
                self._thread.start()
            job = self._llm._post(work)
        self._wake.put(None)
        job.add_done_callback(lambda done: self._wake.put(None))  # another thread may do it, and go
        return job

    def stop(self) -> None:
        """The thread ends after the round it is at. What was posted before is done."""
        with self._lock:
            self._stopped, thread = True, self._thread
        self._wake.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self.asleep = self._wake.empty()
            self._wake.get()
            self.asleep = False
            try:
                while self._llm._has_work and not self._stopped:
                    self._llm._take_turn()
            except BaseException as error:
                self._llm._post(partial(self._fail, error))
            self._llm._serve()
        self._llm._serve()  # what was posted while it came to its end

    def _fail(self, error: BaseException) -> None:
        """A round failed: all who wait here hear of it, and their requests are dropped."""
        for request in list(self._llm._boxes.values()):
            if isinstance(request, Request):
                request(error)
                self._llm._post(partial(self._llm._forget, request.asked.samples))
