"""Restarts a killed worker and resubmits its unacknowledged jobs and requests."""

import logging
import time
from collections import deque
from collections.abc import Callable

from lightning_zenflow.telemetry.counters import Completion
from lightning_zenflow.telemetry.stalls import StallClock
from lightning_zenflow.worker.causes import OutOfMemoryKills
from lightning_zenflow.worker.process import (
    ExportMessage,
    JobMessage,
    Request,
    TouchMessage,
    Worker,
    WorkerError,
    WorkerKilled,
)

_log = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
"""Seconds over which restarts count towards `max_worker_restarts`."""


class SupervisedWorker:
    """A worker that is restarted when a signal kills it: the kernel's out-of-memory killer, an operator, a fault of its own.

    Recovery. All inputs and outputs of jobs are in the arena, which the trainer owns and which outlives workers. After a death:

    1. *reap*: wait until the kernel has ended all threads of the dead process, so that none of them writes any more.
    2. *restart*: start a new worker on the same arena.
    3. *resubmit*: submit all unacknowledged jobs and requests again, unchanged and in order.
    4. *continue*, in the worker: jobs are idempotent. Those up to the header's `completed_job` are acknowledged without being applied
       again. The one that was in progress continues from the undo log: each thread's journal entry (``csrc/worker/journal.h``) tells how
       far it was, and a tile whose last update may be incomplete is updated again from its saved copy
       (``csrc/replay/tile_journal.h``). Later jobs have not changed anything.

    Every update is therefore applied exactly once, and the run has the same bits whenever the worker dies: at its start, while it waits,
    within a tile, between master and published weights, before or after its answer, or again during recovery.

    Other failures are raised at once: an error that the worker reports would only be repeated, as would a missed `worker_timeout`; too
    many deaths indicate a fault of the system.

    Args:
        start: starts a worker on the arena.
        max_restarts: limit within `RESTART_WINDOW_S`.
        stalls: counts restarts, and the worker's time for exports.

    Raises:
        WorkerError: no worker could be started.
    """

    def __init__(self, start: Callable[[], Worker], *, max_restarts: int, stalls: StallClock) -> None:
        self._start_worker = start
        self._max_restarts = max_restarts
        self._stalls = stalls
        self._unacknowledged: deque[JobMessage | Request] = deque()
        self._completions: deque[Completion] = deque()  # received, and not yet returned by `wait`
        self._n_requests = self._last_acknowledged = 0
        self._restart_times: deque[float] = deque()
        self._memory_kills = OutOfMemoryKills()
        self._worker = self._start()

    @property
    def pid(self) -> int:
        """Process ID of the current worker."""
        return self._worker.pid

    def submit(self, message: JobMessage | Request) -> None:
        """Submits a job or a request; returns immediately unless the worker must be restarted.

        Raises:
            WorkerError: the worker failed, or died too often.
        """
        self._unacknowledged.append(message)
        try:
            self._worker.submit(message)
        except WorkerKilled as death:
            with self._stalls.measure("restart"):
                self._replace(death)

    def export(self, *, tiles_offset: int, n_tiles: int) -> int:
        """Requests the state of some entries as it is after all jobs submitted so far; returns immediately, as `submit` does.

        Until the request is acknowledged, a killed worker repeats it. So no job that changes these entries may be submitted before, unless
        the result is not wanted any more.

        Returns:
            Number of the request, for `has_done` and `wait_for_request`.
        """
        self._n_requests += 1
        self.submit(ExportMessage(request_id=self._n_requests, tiles_offset=tiles_offset, n_tiles=n_tiles))
        return self._n_requests

    def touch(self, offset: int, n_rows: int, row_bytes: int) -> None:
        """Allocates [offset, offset + n_rows * row_bytes) of the arena on the NUMA nodes of the worker's threads, and waits for it."""
        self._n_requests += 1
        self.submit(TouchMessage(request_id=self._n_requests, offset=offset, n_rows=n_rows, row_bytes=row_bytes))
        self.wait_for_request(self._n_requests)

    def wait(self) -> Completion:
        """Waits for the oldest job that this method has not returned, across restarts.

        Raises:
            WorkerError: the worker failed, died too often, or did not answer in time.
        """
        while not self._completions:
            self._receive()
        return self._completions.popleft()

    def wait_for_request(self, request: int) -> None:
        """Waits for a request, across restarts. Raises like `wait`."""
        while request > self._last_acknowledged:
            self._receive()

    def has_answered(self) -> bool:
        """Whether `wait` would return immediately, unless the worker has died."""
        self._receive_answered()
        return bool(self._completions)

    def has_done(self, request: int) -> bool:
        """Whether `wait_for_request` would return immediately, unless the worker has died."""
        self._receive_answered()
        return request <= self._last_acknowledged

    def restart(self) -> None:
        """Replaces the worker by a new one, which reads the arena's tables again; only while no job is in flight."""
        assert not self._unacknowledged and not self._completions, "restart requires a flush"
        self._worker.close()
        self._worker = self._start()

    def close(self) -> None:
        """Lets the worker complete the submitted jobs and exit; kills it if it does not."""
        self._worker.close()

    def kill(self) -> None:
        """Kills the worker. Idempotent."""
        self._worker.kill()

    def _receive_answered(self) -> None:
        """Receives the answers that are there."""
        while self._unacknowledged and self._worker.has_answered():
            try:
                self._receive_oldest()
            except WorkerKilled as death:
                with self._stalls.measure("restart"):
                    self._replace(death)

    def _receive(self) -> None:
        """Waits for the answer to the oldest unacknowledged message, across restarts."""
        while True:
            try:
                return self._receive_oldest()
            except WorkerKilled as death:
                self._replace(death)

    def _receive_oldest(self) -> None:
        message = self._unacknowledged[0]
        if isinstance(message, JobMessage):
            completion = self._worker.wait()
            assert completion.job_id == message.job_id, "the worker answers in order of submission"
            self._completions.append(completion)
        else:
            done = self._worker.wait_for_request()
            assert done.request_id == message.request_id, "the worker answers in order of submission"
            self._last_acknowledged = done.request_id
            self._stalls.worker_busy_s += 1e-9 * done.busy_ns
        self._unacknowledged.popleft()

    def _replace(self, death: WorkerKilled) -> None:
        """Starts another worker and resubmits the unacknowledged jobs and requests."""
        while True:
            self._count(death)
            self._worker.kill()
            self._worker = self._start()
            try:
                for message in self._unacknowledged:
                    self._worker.submit(message)
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
            WorkerError: the limit is exceeded.
        """
        cause = self._memory_kills.since_last()
        because = f"\n{cause}" if cause else ""
        now = time.monotonic()
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) >= self._max_restarts:
            raise WorkerError(
                f"{death}{because}\nThe worker was restarted {len(self._restart_times)} times within {RESTART_WINDOW_S / 60:g} minutes, the"
                f" limit max_worker_restarts={self._max_restarts};"
                f" {'take less memory' if cause else 'find out what kills it'}, or raise the limit"
            ) from death
        self._restart_times.append(now)
        self._stalls.worker_restarts += 1
        _log.warning("%s%s; a new worker continues, nothing is lost", death, because)
