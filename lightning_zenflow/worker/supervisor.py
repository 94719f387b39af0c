"""Keeps a worker running: whatever kills one, another goes on where it was."""

import logging
import time
from collections import deque
from collections.abc import Callable

from lightning_zenflow.telemetry.counters import Completion
from lightning_zenflow.telemetry.stalls import StallClock
from lightning_zenflow.worker.process import JobMessage, Worker, WorkerError, WorkerKilled

_log = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
"""Seconds over which restarts are counted against `max_worker_restarts`."""


class SupervisedWorker:
    """A worker that is replaced when a signal ends it: by the system that runs out of memory, an operator, a fault of its own.

    The protocol of recovery. Everything a round needs and everything it produces lies in the arena, which the trainer owns and which
    outlives any worker. So after a death:

    1. The dead process is waited for until the kernel says that all of its threads have ended: none of them writes any more.
    2. A new one is started on the same arena, and told of nothing.
    3. All jobs whose answer has not been read are submitted again, unchanged and in the same order.
    4. The new worker finds in the arena's header the last round that was completed and the last that was begun
       (``csrc/protocol.h``). JobQueue up to the former it answers at once; their answers were lost, not their work. If the latter is
       another one, it was in hand: the journal (``csrc/journal.h``) has each thread's share of it and what is done of that; a tile
       whose last update may be half written is updated again from the copy beside it (``csrc/tile_journal.h``). All other jobs have
       touched nothing and are carried out as usual, as are the waits for their steps' data.

    So every update is applied exactly once and the run ends with the same bits, whenever the worker dies: while it starts or waits, within
    a tile, between master weights and published ones, before its answer and after it. It may die again during all this.

    What is not repaired: a worker that reports an error and exits would report it again, so that is raised at once; so is a missed
    `worker_timeout`; and a worker that dies too often is a fault that somebody has to look at.

    Args:
        start: starts a worker on the arena.
        max_restarts: so many within `RESTART_WINDOW_S` are allowed.
        stalls: where restarts are counted.

    Raises:
        WorkerError: no worker could be started.
    """

    def __init__(self, start: Callable[[], Worker], *, max_restarts: int, stalls: StallClock) -> None:
        self._start_worker = start
        self._max_restarts = max_restarts
        self._stalls = stalls
        self._unanswered: deque[JobMessage] = deque()
        self._restart_times: deque[float] = deque()
        self._worker = self._start()

    @property
    def pid(self) -> int:
        """Process number of the present worker."""
        return self._worker.pid

    def submit(self, submission: JobMessage) -> None:
        """Hands a round over; returns at once, but for a restart.

        Raises:
            WorkerError: the worker failed, or dies too often.
        """
        self._unanswered.append(submission)
        try:
            self._worker.submit(submission)
        except WorkerKilled as death:
            with self._stalls.measure("restart"):
                self._replace(death)

    def wait(self) -> Completion:
        """Waits for the oldest round that has not been answered yet, across restarts.

        Raises:
            WorkerError: the worker failed, dies too often, or does not answer in time.
        """
        while True:
            try:
                completion = self._worker.wait()
            except WorkerKilled as death:
                self._replace(death)
            else:
                submission = self._unanswered.popleft()
                assert completion.job_id == submission.job_id, "the worker answers in order of submission"
                return completion

    def has_answered(self) -> bool:
        """Whether `wait` need not wait for the oldest round, but for a restart if the worker has died."""
        return self._worker.has_answered()

    def restart(self) -> None:
        """Starts a new worker in place of the present one, which reads the arena's tables anew; with no round in flight only."""
        assert not self._unanswered, "flush comes before"
        self._worker.close()
        self._worker = self._start()

    def close(self) -> None:
        """Asks the worker to exit once it is through with what it has, and waits for it; kills it if it does not."""
        self._worker.close()

    def kill(self) -> None:
        """Ends the worker now. May be called again."""
        self._worker.kill()

    def _replace(self, death: WorkerKilled) -> None:
        """Starts another worker and submits again what was not answered."""
        while True:
            self._count(death)
            self._worker.kill()
            self._worker = self._start()
            try:
                for submission in self._unanswered:
                    self._worker.submit(submission)
                return
            except WorkerKilled as another:
                death = another

    def _start(self) -> Worker:
        while True:
            try:
                return self._start_worker()
            except WorkerKilled as death:
                self._count(death)

    def _count(self, death: WorkerKilled) -> None:
        """Counts a restart.

        Raises:
            WorkerError: there were too many.
        """
        now = time.monotonic()
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) >= self._max_restarts:
            raise WorkerError(
                f"{death}\nWorkers have been restarted {len(self._restart_times)} times within {RESTART_WINDOW_S / 60:g} minutes;"
                f" allowed are max_worker_restarts={self._max_restarts}"
            ) from death
        self._restart_times.append(now)
        self._stalls.worker_restarts += 1
        _log.warning("%s; another one goes on in its place, nothing is lost", death)
