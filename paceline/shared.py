"""One engine, many callers: requests come from any thread, rounds are done by whoever waits, updates go to who asked.

Nobody queues for a lock, so nobody starves. What is to be done to the engine (queue a request, abort one, another
drafter) is a *job*: whoever holds the engine does all jobs before its next round, and the caller itself does them where
nobody holds it. Who waits for text does rounds while nobody else is at one, and sleeps through another's. Every round
serves everybody's requests in one batch.

This module knows threads, requests and updates; it must not know prompts, parameters or texts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from paceline.engine.engine import Engine
from paceline.engine.sequence import Sequence
from paceline.engine.update import Update
from paceline.errors import EngineError

Box = Callable[[Update], None]  # where a request's updates go; called by whichever thread did the round
NOWHERE: Box = deque[Update](maxlen=0).append  # of a request that nobody waits for
LOOK_AGAIN = 1.0  # seconds: Ctrl-C may have struck whoever was to wake us


class Shared:
    """What every caller of an LLM shares: its engine, and the requests under way."""

    engine: Engine

    def __init__(self) -> None:
        self._live: dict[str, list[Sequence]] = {}
        self._boxes: dict[str, Box] = {}
        self._mail: deque[Update] = deque()  # of requests that were added
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._held = threading.Lock()  # the engine; who sees it taken does not wait for it
        self._holder: int | None = None  # the thread that has it
        self._turning = threading.RLock()  # a condition's own `with` can be cut short, a lock's cannot
        self._turns = threading.Condition(self._turning)
        self._num_turns = 0  # how often the engine was let go
        self._closed = False

    # The engine's own pace, for servers and tests: add (which needs a prompt read, so it is LLM's), step, abort.

    def step(self) -> list[Update]:
        """One round of the engine; returns what completed rounds brought the added requests, possibly nothing.

        Whoever else asks for rounds meanwhile, nothing is lost: it is returned by the next step. If several threads
        take steps, each update goes to one of them.
        """
        self._take_turn()
        updates = []
        while self._mail:
            updates.append(self._mail.popleft())
        return updates

    def abort(self, request_id: str) -> None:
        """End a request now, from any thread; unknown or finished ones are left alone."""
        self._do(lambda: self._abort(request_id))

    def close(self) -> None:
        """Free weights and cache. Requests under way end with finish_reason "abort"; later calls are refused."""
        if not self._closed:
            self._do(self._shut, wait_for_it=True)

    def _check_open(self) -> None:
        """Raise where there is no engine any more."""
        if self._closed:
            raise EngineError("this LLM is closed; make a new one to go on")

    @property
    def _has_work(self) -> bool:
        """Whether rounds or jobs are left to do."""
        return bool(self._jobs) or (not self._closed and self.engine.has_work)

    def _queue(self, samples: list[Sequence], box: Box | None = None) -> None:
        """A request's samples join the next round."""
        self._do(lambda: self._add(samples, box))

    def _drop(self, samples: list[Sequence]) -> None:
        """Whoever asked for these has gone."""
        self._do(lambda: self._forget(samples))

    def _take_turn(self) -> None:
        """One round: this thread's or, if another is at one, that one, slept through."""
        self._refuse_inside()
        if self._held.locked():
            turn = self._num_turns
            with self._turning:
                self._turns.wait_for(lambda: self._num_turns != turn or not self._held.locked(), LOOK_AGAIN)
            return
        try:
            self._hold(self._round)
        finally:
            self._serve()

    def _round(self) -> None:
        self._do_jobs()
        self._check_open()
        self.engine.step()
        self._tell()

    # Jobs

    def _do(self, work: Callable[[], Any], wait_for_it: bool = False) -> None:
        """Done at once where nobody holds the engine, else by its holder when the round is over. What goes wrong in
        it is raised here if it is known here."""
        if wait_for_it:
            self._refuse_inside()
        job = self._post(work)
        self._serve()
        while wait_for_it and not job.done():
            wait([job], LOOK_AGAIN)
            self._serve()
        if job.done():
            job.result()

    def _post(self, work: Callable[[], Any]) -> Future[Any]:
        """Left for whoever comes to do jobs; never waits, whatever holds the engine."""
        job: Future[Any] = Future()
        self._jobs.append((work, job))
        return job

    def _serve(self) -> None:
        """Do the jobs there are. Whoever holds the engine comes here after letting go, so none is left lying."""
        while self._jobs and not self._held.locked():
            self._hold(self._do_jobs)

    def _do_jobs(self) -> None:
        """In their order. One that Ctrl-C cuts short stays, and is done again: it may be another thread's."""
        while self._jobs:
            work, job = self._jobs[0]
            if not job.done():
                try:
                    job.set_result(work())
                except Exception as error:
                    job.set_exception(error)
            self._jobs.popleft()

    def _hold(self, work: Callable[[], None]) -> None:
        """Do something with the engine in hand. The `with` is the lock's own: no Ctrl-C keeps it from being let go."""
        try:
            with self._held:
                self._holder = threading.get_ident()
                try:
                    work()
                finally:
                    self._holder = None
        finally:
            with self._turning:
                self._num_turns += 1
                self._turns.notify_all()

    def _refuse_inside(self) -> None:
        """A round cannot wait for another inside itself."""
        if self._held.locked() and self._holder == threading.get_ident():
            raise EngineError("the engine was called from inside one of its own rounds; call it from elsewhere")

    # What jobs and rounds do, by the thread that holds the engine

    def _add(self, samples: list[Sequence], box: Box | None, ends: bool = False) -> None:
        self._check_open()
        request_id = samples[0].request_id
        again = request_id in self._live  # it was cut short
        self._live[request_id] = samples
        if box is not None:
            self._boxes[request_id] = box
        for sample in samples:
            sample.watched = box is not None and not ends  # else the last update is all that anybody wants
            if not (again and sample in self.engine.scheduler.waiting):
                self.engine.add(sample)

    def _abort(self, request_id: str) -> None:
        for sample in self._live.get(request_id, []):
            self.engine.abort(sample)
        self._live.pop(request_id, None)

    def _forget(self, samples: list[Sequence]) -> None:
        self._live.pop(samples[0].request_id, None)
        self._boxes.pop(samples[0].request_id, None)
        for sample in samples:
            if not (sample.end_told or self._closed):
                self.engine.abort(sample, tell=False)

    def _tell(self) -> None:
        """Every update into the box it belongs to, in the order of rounds."""
        updates = self.engine.updates  # taken off one by one: what an interrupt leaves lying is told by the next round
        while updates:
            request_id, ended = updates[0][1].request_id, updates[0][1].finish_reason is not None
            self._boxes.get(request_id, NOWHERE)(updates.popleft()[1])
            if not ended or any(other.request_id == request_id for _, other, _ in updates):
                continue
            if all(sample.end_told for sample in self._live.get(request_id, ())):
                self._live.pop(request_id, None)
                self._boxes.pop(request_id, None)

    def _shut(self) -> None:
        if self._closed:
            return
        try:
            for request_id in list(self._live):
                self._abort(request_id)
            while self.engine.has_work:
                self.engine.step()
                self._tell()
        finally:
            self._closed = True
            self._free()

    def _free(self) -> None:
        del self.engine
