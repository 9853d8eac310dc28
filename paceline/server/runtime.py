"""What runs in the engine's process: requests come in, rounds are done, updates go out. It knows no HTTP.

It relies on `LLM.add`, `step` and `abort` as the design states them: completed rounds may come late.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from paceline.engine.update import Update
from paceline.errors import PacelineError, first_line
from paceline.params import SamplingParams
from paceline.requests import Limits

FIGURES_EVERY = 0.25  # seconds, while there is work


class Add(NamedTuple):
    """One request: its tokens, already checked."""

    tag: str
    ids: list[int]
    params: SamplingParams


class Abort(NamedTuple):
    tag: str


class Stop(NamedTuple):
    """Finish nothing more."""


class Ready(NamedTuple):
    """The model is there."""

    limits: Limits
    drafter: str | None
    max_num_seqs: int
    num_pages: int
    block_size: int


class Figures(NamedTuple):
    """The engine's state, now and since its start."""

    running: int
    waiting: int
    pages_used: int
    rounds: int
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    plain_seconds: float  # what rounds without drafts would have taken for the same tokens, as estimated
    preemptions: int


class Told(NamedTuple):
    updates: list[Update]  # their request ids are tags
    entered: list[float]  # of requests whose first round this was: the seconds they had waited
    figures: Figures | None


class Refused(NamedTuple):
    """A request that could not be queued after all."""

    tag: str
    sentence: str


class Notice(NamedTuple):
    """Something to be logged where the user looks."""

    sentence: str


class Fault(NamedTuple):
    """The engine cannot go on; its process ends."""

    sentence: str


def run(connection: Connection, make: Callable[[], Any]) -> None:
    """The process: load the model, then serve until told to stop or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which lets requests finish
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log = logging.getLogger("paceline")
    log.addHandler(_Notices(connection))
    try:
        llm = make()
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it for garbage would hold up everybody's text
        Loop(connection, llm).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the server has gone
    except BaseException as error:
        told = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {first_line(error)}"
        with contextlib.suppress(OSError):
            connection.send(Fault(told))
        os._exit(1)
    os._exit(0)  # whatever takes its time in a library must not keep the server waiting


class _Notices(logging.Handler):
    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.WARNING)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(Notice(record.getMessage()))


class Loop:
    def __init__(self, connection: Connection, llm: Any) -> None:
        self._connection, self._llm = connection, llm
        self._tags: dict[str, str] = {}  # by the engine's own ids
        self._ids: dict[str, str] = {}  # the other way
        self._left: dict[str, int] = {}  # samples under way, by tag
        self._spent = Spent()
        self._queued: dict[str, float] = {}  # by the engine's own ids, since when
        self._told_at = 0.0

    def run(self) -> None:
        engine, options = self._llm.engine, self._llm.options
        drafter = engine.drafter.name if engine.drafter is not None else None
        pool = engine.cache.pool
        self._connection.send(Ready(self._llm.limits, drafter, options.max_num_seqs, pool.num_pages, pool.block_size))
        while self._hear():
            begun = time.monotonic()
            self._tell(self._llm.step(), begun)

    def _hear(self) -> bool:
        """Take what has come, waiting for something where there is nothing to do; False: stop."""
        while self._connection.poll(0 if self._llm.engine.has_work else None):
            message = self._connection.recv()
            if isinstance(message, Stop):
                return False
            if isinstance(message, Add):
                self._add(message)
            elif isinstance(message, Abort) and message.tag in self._ids:
                self._llm.abort(self._ids[message.tag])
        return True

    def _add(self, asked: Add) -> None:
        try:
            own = self._llm.add(asked.ids, asked.params)
        except PacelineError as error:
            self._connection.send(Refused(asked.tag, str(error)))
            return
        self._tags[own], self._ids[asked.tag], self._left[asked.tag] = asked.tag, own, asked.params.n
        self._queued[own] = time.monotonic()

    def _tell(self, updates: list[Update], begun: float) -> None:
        named = []
        for update in updates:
            tag = self._tags.get(update.request_id)
            if tag is None or not (update.tokens or update.finished):  # a part of a prompt was read
                continue
            named.append(update._replace(request_id=tag))
            self._left[tag] -= update.finished
            if not self._left[tag]:
                del self._left[tag], self._ids[tag], self._tags[update.request_id]
        now = time.monotonic()
        figures = None
        if now - self._told_at > FIGURES_EVERY or not self._llm.engine.has_work:
            figures, self._told_at = self._figures(), now
        entered = self._entered(begun)
        if named or entered or figures is not None:
            self._connection.send(Told(named, entered, figures))

    def _entered(self, now: float) -> list[float]:
        """How long the requests had waited that took part in a round for the first time."""
        if not self._queued:
            return []
        waiting = {sequence.request_id for sequence in self._llm.engine.scheduler.waiting}
        gone = [own for own in self._queued if own not in waiting]
        return [now - self._queued.pop(own) for own in gone]

    def _figures(self) -> Figures:
        engine = self._llm.engine
        scheduler, pool = engine.scheduler, engine.cache.pool
        self._spent.take(engine.stats)
        used = pool.num_pages - pool.num_available
        return Figures(
            len(scheduler.running),
            len(scheduler.waiting),
            used,
            engine.stats.rounds,
            self._spent.draft,
            self._spent.verify,
            self._spent.rest,
            self._spent.plain,
            scheduler.num_preemptions,
        )


class Spent:
    """Seconds of all rounds, and an estimate of what plain ones would have taken.

    A forward's time is a constant and so much a row, fitted to recent rounds. A plain engine would have done, for each
    sequence, a round of one row a token.
    """

    def __init__(self) -> None:
        self.draft = self.verify = self.rest = self.plain = 0.0
        self._seen = 0

    def take(self, stats: Any) -> None:
        """The rounds that are new."""
        count = min(stats.rounds - self._seen, len(stats.recent))
        new = list(stats.recent)[len(stats.recent) - count :]
        self._seen = stats.rounds
        base, each = _fit([(record.rows, record.verify_seconds) for record in stats.recent])
        for record in new:
            self.draft += record.draft_seconds
            self.verify += record.verify_seconds
            self.rest += record.rest_seconds
            spent = record.draft_seconds + record.verify_seconds + record.rest_seconds
            if not record.proposed:
                self.plain += spent
                continue
            rounds = record.emitted / record.sequences  # a plain engine needs for the same tokens, on average
            forward = min(base + each * record.sequences, record.verify_seconds)
            self.plain += rounds * (forward + record.rest_seconds)


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """A line through (rows, seconds), neither part of it negative; all is constant where rows are all alike."""
    count = len(points)
    if not count:
        return 0.0, 0.0
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope
