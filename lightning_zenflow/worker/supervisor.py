"""Restarts a killed worker and resubmits the jobs and requests that it has not answered."""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count

from lightning_zenflow.native import Done, MessageType, Touch
from lightning_zenflow.telemetry import Cause, Telemetry
from lightning_zenflow.worker.process import Answer, JobMessage, Worker, WorkerError, WorkerKilled, WorkerTimeout

_log = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
"""Seconds over which restarts count towards `max_worker_restarts`."""


@dataclass(kw_only=True, eq=False)
class Submission:
    """A message to the worker, and whether its answer has been read. Nothing but `SupervisedWorker` changes it."""

    message: JobMessage | Touch
    is_answered: bool = False


class SupervisedWorker:
    """A worker that is restarted when a signal kills it: the kernel's out-of-memory killer, an operator, a fault of its own.

    Recovery (docs/how_it_works.md, "Death of the worker"). When the kernel has ended all threads of the dead process, so that none of them
    writes any more, a new worker starts on the same arena and gets all messages without an answer again, unchanged and in order. Jobs are
    idempotent.

    Interruptions. An exception that comes from outside, such as `KeyboardInterrupt`, may cut an exchange with the worker between a system
    call and the record of it. The next exchange therefore recovers first, as after a death. A message is recorded before it is sent, so
    none is lost.

    Other failures, and more than `max_restarts` within `RESTART_WINDOW_S`, are raised at once as WorkerError, and again at every later
    exchange; that of a missed `worker_timeout` has `diagnosis`, the records of whoever submits.
    """

    def __init__(self, start: Callable[[], Worker], *, max_restarts: int, telemetry: Telemetry) -> None:
        self.diagnosis: Callable[[], str] = str
        self._start_worker = start
        self._max_restarts = max_restarts
        self._telemetry = telemetry
        self._unanswered: deque[Submission] = deque()
        self._n_sent = 0  # of them, from the oldest on
        # Whether an exchange is under way; outside of one, whether an exception has cut the last one.
        self._is_cut = False
        self._failure: WorkerError | None = None
        self._restart_times: list[float] = []
        self._request_ids = count(1)
        self._worker = self._start()

    @property
    def pid(self) -> int:
        """Process ID of the current worker."""
        return self._worker.pid

    def enqueue(self, message: JobMessage | Touch) -> Submission:
        """Records a message, which `send` or a wait sends; no system call."""
        self._unanswered.append(Submission(message=message))
        return self._unanswered[-1]

    def send(self) -> None:
        """Sends what is enqueued; returns immediately unless the worker must be restarted."""
        while self._n_sent < len(self._unanswered):
            self._carry_out(self._send_next, "restart")

    def touch(self, offset: int, n_rows: int, row_bytes: int) -> None:
        """Allocates [offset, offset + n_rows * row_bytes) of the arena on the NUMA nodes of the worker's threads, and waits for it."""
        ids = {"type": MessageType.TOUCH, "request_id": next(self._request_ids)}
        self.wait_for(self.enqueue(Touch(**ids, offset=offset, n_rows=n_rows, row_bytes=row_bytes)))

    def wait_for(self, *submissions: Submission) -> None:
        """Waits for one of the answers, across restarts."""
        self.send()
        while not any(submission.is_answered for submission in submissions):
            self._carry_out(self._receive, None)

    def has_answered(self, submission: Submission) -> bool:
        """Whether `wait_for` would return immediately; reads the answers that are there, until this one."""
        self.send()
        while not submission.is_answered and self._worker.has_answered():
            self._carry_out(self._receive, "restart")
        return submission.is_answered

    def restart(self) -> None:
        """Replaces the worker by a new one, which reads the arena's tables again; only while no job is in flight."""
        assert not self._unanswered, "restart requires a flush"
        self._is_cut = True
        self._worker.close()
        self._replace()

    def close(self) -> None:
        """As `Worker.close`."""
        self._worker.close()

    def kill(self) -> None:
        """As `Worker.kill`."""
        self._worker.kill()

    def _carry_out(self, exchange: Callable[[], None], cause: Cause | None) -> None:
        """Exchanges one message with the worker, across restarts; measures a restart as a wait by `cause`, unless the caller does."""
        if self._failure is not None:
            raise WorkerError(str(self._failure)) from self._failure
        try:
            if self._is_cut:
                _log.info("an exception interrupted an exchange with the ZenFlow worker; a new worker continues")
                self._replace()
            try:
                self._is_cut = True
                exchange()
                self._is_cut = False
            except WorkerKilled as death:
                with nullcontext() if cause is None else self._telemetry.measure(cause):
                    self._count(death)
                    self._replace()
        except WorkerTimeout as failure:
            records = f"{len(self._unanswered)} messages without an answer, {self._n_sent} of them sent"
            self._failure = WorkerTimeout(f"{failure}\nTrainer: {records}; {self.diagnosis()}")
            raise self._failure from failure
        except WorkerError as failure:
            self._failure = failure
            raise

    def _send_next(self) -> None:
        # Read again: a restart has sent all of them.
        if self._n_sent < len(self._unanswered):
            self._worker.submit(self._unanswered[self._n_sent].message)
            self._n_sent += 1

    def _receive(self) -> None:
        answer = self._worker.wait()
        submission = next((s for s in self._unanswered if _answers(answer, s.message)), None)
        if submission is None:
            raise WorkerError(f"{self._worker} answered what it was not asked: {bytes(answer).hex(' ', 8)}")
        self._telemetry.worker_busy_s += 1e-9 * answer.busy_ns
        submission.is_answered = True
        self._unanswered.remove(submission)
        self._n_sent -= 1

    def _replace(self) -> None:
        """Starts another worker and resubmits what has no answer."""
        while True:
            self._worker.kill()
            self._worker = self._start()
            self._unanswered = deque(s for s in self._unanswered if not s.is_answered)
            self._n_sent = 0
            try:
                for _ in range(len(self._unanswered)):
                    self._send_next()
                self._is_cut = False
                return
            except WorkerKilled as death:
                self._count(death)

    def _start(self) -> Worker:
        while True:
            try:
                return self._start_worker()
            except WorkerKilled as death:
                self._count(death)

    def _count(self, death: WorkerKilled) -> None:
        """Counts a restart, unless that exceeds the limit."""
        now = time.monotonic()
        self._restart_times = [before for before in self._restart_times if now - before <= RESTART_WINDOW_S]
        if len(self._restart_times) >= self._max_restarts:
            raise WorkerError(
                f"{death}\nThe worker was restarted {len(self._restart_times)} times within {RESTART_WINDOW_S / 60:g} minutes, the limit"
                f" max_worker_restarts={self._max_restarts}; find out what kills it, often the kernel for lack of memory (`dmesg`), or"
                " raise the limit"
            ) from death
        self._restart_times.append(now)
        self._telemetry.worker_restarts += 1
        _log.warning("%s; a new worker continues, nothing is lost", death)


def _answers(answer: Answer, message: JobMessage | Touch) -> bool:
    if isinstance(answer, Done):
        return isinstance(message, JobMessage) and (answer.job_id, answer.block) == (message.job_id, message.block)
    return not isinstance(message, JobMessage) and answer.request_id == message.request_id
