"""The engine's process, from outside: started, fed, listened to, and started again when it falls.

Everything here is called in the event loop. Two threads stand at the pipe, so that neither a full nor an empty one
makes the loop wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from paceline.engine.update import Update
from paceline.errors import EngineError, OptionError, PacelineError
from paceline.params import SamplingParams
from paceline.server.runtime import Abort, Add, Fault, Figures, Notice, Ready, Refused, Stop, Told, run

log = logging.getLogger("paceline")

MOST_FALLS = 3  # in a row, before a model was loaded: then it is not tried again
STOP_SECONDS = 5.0


class EngineProcess:
    """make: builds the LLM, in the process; it is sent there, so it must be a function that can be pickled."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._connection: Connection | None = None
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._tags = itertools.count()
        self._falls = 0
        self._stopping = False
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ready: Ready | None = None  # None: it is starting, or has fallen
        self.fault: str | None = None  # the last one
        self.failed = False  # it will not be tried again
        self.num_restarts = 0
        self.figures: Figures | None = None
        self.on_update: Callable[[Update], None] = lambda update: None
        self.on_enter: Callable[[float], None] = lambda seconds: None  # told how long a request has waited for a slot
        self.on_leave: Callable[[str], None] = lambda tag: None

    @property
    def num_samples(self) -> int:
        """Answers under way."""
        return sum(stream.left for stream in self._streams.values())

    async def start(self) -> Ready:
        """The process, with its model loaded; raises where it cannot be."""
        self._loop = asyncio.get_running_loop()
        if not self.failed:
            self._launch()
        while self.ready is None and not self.failed:
            self._changed.clear()
            await self._changed.wait()
        if self.ready is None:
            raise EngineError(self.fault or "the engine's process ended before its model was loaded")
        return self.ready

    async def stop(self) -> None:
        """Requests under way end with an error; the process ends."""
        self._stopping = True
        self._outbox.put(Stop())
        if self._process is not None:
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
            if self._process.is_alive():
                self._process.kill()
                await asyncio.to_thread(self._process.join)
        self._fail_all("the server is stopping")

    def give_up(self) -> None:
        """Whoever waits for the model waits no longer; also for handlers of signals."""
        self.failed, self.fault = True, "it was told to stop"
        self._call(self._changed.set)

    def kill(self) -> None:
        """At once, wherever it is; one that has ended is left alone."""
        if self._process is not None and self._process.is_alive():
            self._stopping = True
            self._process.kill()

    def submit(self, ids: list[int], params: SamplingParams) -> Stream:
        """Queue a checked request; raises EngineError while there is no engine."""
        if self.ready is None:
            raise EngineError(self.why_not())
        tag = str(next(self._tags))
        stream = self._streams[tag] = Stream(self, tag, params.n)
        self._outbox.put(Add(tag, ids, params))
        return stream

    def leave(self, stream: Stream) -> None:
        """Nobody waits for it any more: what is left of it is aborted."""
        if self._streams.pop(stream.tag, None) is not None:
            self._outbox.put(Abort(stream.tag))
            self.on_leave(stream.tag)

    def is_under_way(self, tag: str) -> bool:
        return tag in self._streams

    def why_not(self) -> str:
        if self.failed:
            return f"the engine could not be started: {self.fault}"
        return "the engine is starting" if self.fault is None else f"the engine is starting again; before: {self.fault}"

    def _launch(self) -> None:
        ours, theirs = self._context.Pipe()
        self._connection, self._outbox = ours, SimpleQueue()
        self._process = self._context.Process(
            target=run, args=(theirs, self._make), name="paceline-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        for work in (self._read, self._write):
            threading.Thread(target=work, args=(ours, self._outbox), name="paceline-pipe", daemon=True).start()

    # In threads of their own

    def _read(self, connection: Connection, outbox: SimpleQueue[Any]) -> None:
        try:
            while True:
                self._call(self._heard, connection.recv())
        except (EOFError, OSError):
            outbox.put(None)
            self._call(self._fell, connection)

    def _write(self, connection: Connection, outbox: SimpleQueue[Any]) -> None:
        while (message := outbox.get()) is not None:
            try:
                connection.send(message)
            except OSError:
                return  # who reads says what happened

    def _call(self, function: Callable[..., None], *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *given)

    # In the loop

    def _heard(self, message: Any) -> None:
        if isinstance(message, Told):
            self.figures = message.figures or self.figures
            for seconds in message.entered:
                self.on_enter(seconds)
            for update in message.updates:
                stream = self._streams.get(update.request_id)
                if stream is not None:
                    stream.hear(update)
                    if not stream.left:
                        del self._streams[update.request_id]
                self.on_update(update)
        elif isinstance(message, Ready):
            self.ready, self._falls, self.fault = message, 0, None
            self._changed.set()
        elif isinstance(message, Refused):
            stream = self._streams.pop(message.tag, None)
            if stream is not None:
                stream.hear(OptionError(message.sentence))
        elif isinstance(message, Notice):
            log.warning("%s", message.sentence)
        elif isinstance(message, Fault):
            self.fault = message.sentence

    def _fell(self, connection: Connection) -> None:
        """The process is gone: everyone under way hears of it, and another one is started."""
        if connection is not self._connection:
            return
        was_ready, self.ready, self.figures = self.ready is not None, None, None
        connection.close()
        if self._stopping:
            self._fail_all("the server is stopping")
            return
        self.fault = self.fault or f"the engine's process ended (exit code {self._exit_code()})"
        self._fail_all(f"the engine failed and is being started again: {self.fault}")
        self._falls += not was_ready
        self.num_restarts += was_ready
        if was_ready or (self._falls < MOST_FALLS and self.num_restarts):
            log.error("the engine failed: %s; it is being started again", self.fault)
            self._launch()
        else:
            self.failed = True
        self._changed.set()

    def _exit_code(self) -> Any:
        self._process.join(0.2)
        return self._process.exitcode

    def _fail_all(self, sentence: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.hear(EngineError(sentence))


class Stream(AsyncIterator[Update]):
    """One request's updates. Whoever stops reading calls `close`."""

    def __init__(self, owner: EngineProcess, tag: str, samples: int) -> None:
        self._owner, self.tag, self.left = owner, tag, samples
        self._updates: asyncio.Queue[Update | PacelineError] = asyncio.Queue()
        self._unread = samples

    def hear(self, update: Update | PacelineError) -> None:
        if isinstance(update, Update):
            self.left -= update.finished
        self._updates.put_nowait(update)

    async def __anext__(self) -> Update:
        if not self._unread:
            raise StopAsyncIteration
        update = await self._updates.get()
        if isinstance(update, PacelineError):
            self._unread = 0
            raise update
        self._unread -= update.finished
        return update

    def close(self) -> None:
        self._owner.leave(self)
