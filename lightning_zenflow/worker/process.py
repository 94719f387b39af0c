"""The worker as the trainer sees it: a process that is started, gets messages, answers them, and is started again when a signal kills it.
``csrc/common/protocol.h`` specifies the messages.

The worker is a C++ executable that inherits two file descriptors: the arena's and one end of a socket pair. When the trainer dies, the
kernel closes its end and the worker exits. When the worker dies, the trainer's next wait sees the end of the stream.
"""

import ctypes
import logging
import os
import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import count

from lightning_zenflow import native
from lightning_zenflow.core.process import MEMORY_PREFIX, kept_from_children
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena

_log = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 1.0
"""Time for a requested exit; the worker is killed after it, which loses nothing."""

_DEATH_TIMEOUT_S = 10.0
"""Time for the kernel to end the process."""

_UNMAPPED_BYTES_PER_S = 2**35
"""Of the arena, that the kernel unmaps at the end of a process, at the least: a page of 4 KiB takes it 20 to 40 ns."""

_LOOK_S = 1.0
"""Between two looks at what a worker does that has not answered yet; less where `worker_timeout` is short."""

_STDERR_BYTES = 4096

RESTART_WINDOW_S = 600.0
"""Seconds over which restarts count towards `max_worker_restarts`."""


class WorkerError(RuntimeError):
    """The worker failed, died or did not answer in time. The message contains its last output, if any."""


class WorkerKilled(WorkerError):
    """A signal ended the worker; another one can continue on the same arena."""


@dataclass(frozen=True, kw_only=True)
class JobMessage:
    """An update job; ``zenflow::UpdateJob`` documents the fields. The last slot holds the gradient of the tentative step, if there is one;
    the others are committed. The worker checks all but `prediction_steps` when it reads the message.
    """

    job_id: int
    block: int
    first_step: int
    slots: Sequence[int]
    publish_buffer: int
    prediction_steps: float = 0.0
    tentative: native.Tentative = native.Tentative.NONE

    def __bytes__(self) -> bytes:
        assert 0 <= self.prediction_steps <= 1e6, self
        numbers = {name: value for name, value in vars(self).items() if name != "slots"}
        n_committed = len(self.slots) - bool(self.tentative)
        header = native.UpdateJob(type=native.MessageType.JOB, n_committed=n_committed, **numbers)
        return bytes(header) + bytes((ctypes.c_uint32 * len(self.slots))(*self.slots))


class Worker:
    """Owner of the worker process and of the trainer's end of the socket. The start and every exchange raise WorkerError where the worker
    fails, exits, is late, or cannot be started, and WorkerKilled where a signal ends it.

    Each of the `cores` has one pinned thread. `timeout_s` limits the start and each wait for an answer, without the time in which the
    worker waits for a word of the device or of other ranks; that `word_timeout_s` limits.
    """

    def __init__(self, arena: Arena, *, cores: Sequence[int], timeout_s: float, word_timeout_s: float) -> None:
        self._arena = arena
        self._timeout_s = timeout_s
        self._unmap_s = os.fstat(arena.fd).st_size / _UNMAPPED_BYTES_PER_S
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept_from_children.update((self._socket, remote))
        self._poll = select.poll()
        self._inbox: deque[bytes] = deque()  # answers that have been read, some to make room for a message
        # A memory file instead of a pipe: it need not be drained while the worker runs.
        self._stderr = os.fdopen(os.memfd_create(MEMORY_PREFIX + "worker-stderr", os.MFD_CLOEXEC), "rb", buffering=0)
        self._executable = native.worker_executable()
        self._is_ready = False
        word_timeout_ms = max(1, round(1000 * word_timeout_s))
        arguments = arena.fd, remote.fileno(), ",".join(map(str, cores)), word_timeout_ms
        with ExitStack() as undo:
            # Without its socket, a process that an exception has kept from being known here ends by itself.
            undo.callback(self._release)
            try:
                with remote:
                    self._process = subprocess.Popen(
                        [str(self._executable), *map(str, arguments)],
                        pass_fds=(arena.fd, remote.fileno()),
                        stdin=subprocess.DEVNULL,
                        stdout=self._stderr,
                        stderr=self._stderr,
                        env=native.worker_environment(),
                        start_new_session=True,
                    )
            except OSError as error:
                raise WorkerError(native.cannot_run(self._executable, error.strerror or error)) from error
            undo.callback(self.kill)
            # The start takes as long as the system needs to allocate the states, 12 bytes a parameter.
            ready = self.wait()
            # A worker of another release refuses the arena's version before.
            assert isinstance(ready, native.Ready) and ready.n_threads == len(cores), "one thread for each core"
            undo.pop_all()
        self._is_ready = True

    def __str__(self) -> str:
        return f"the ZenFlow worker (process {self.pid})"

    @property
    def pid(self) -> int:
        """Process ID of the worker."""
        return self._process.pid

    def submit(self, message: JobMessage | native.Touch | native.MessageHeader) -> None:
        """Submits a job, a request or the exit message; returns immediately, unless the socket is full and the worker busy."""
        data = bytes(message)
        assert len(data) <= native.MAX_MESSAGE_BYTES, message
        if self._socket.fileno() < 0:
            raise WorkerError(
                "the ZenFlow worker of this training has been ended, by its end or by an error: set up the training again"
            )
        while True:
            try:
                self._socket.send(data, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._death() from error
            # The socket is full. The worker may be about to send as well, so answers are read while waiting for room.
            if self._wait_for(select.POLLIN | select.POLLOUT, "received no message") & select.POLLIN:
                self._read()

    def wait(self) -> native.Answer:
        """Waits for the next answer."""
        if not self._inbox:
            self._wait_for(select.POLLIN, "did not answer")
            self._read()
        if not (message := self._inbox.popleft()):
            raise self._death()
        kind = native.MessageHeader.from_buffer_copy(message).type
        if kind == native.MessageType.ERROR:
            text = message[ctypes.sizeof(native.MessageHeader) :].decode(errors="replace")
            raise WorkerError(f"{self} failed: {text}")
        return native.ANSWERS[kind].from_buffer_copy(message)

    def has_answered(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        self._poll.register(self._socket, select.POLLIN)
        return bool(self._inbox or self._poll.poll(0))

    def close(self) -> None:
        """Lets the worker complete the submitted jobs and exit; kills it if it does not."""
        if self._process.poll() is None:
            try:
                self.submit(native.MessageHeader(type=native.MessageType.EXIT))
                self._wait_for_end(_EXIT_TIMEOUT_S)
            except (WorkerError, subprocess.TimeoutExpired):
                _log.warning("%s did not exit in time and is killed", self)
        self.kill()

    def kill(self) -> None:
        """Kills the worker and frees its resources. Idempotent."""
        try:
            self._process.kill()
            self._wait_for_end(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"{self} was killed but did not end within {error.timeout:g} s") from error
        finally:
            self._release()

    def _wait_for_end(self, timeout_s: float) -> int:
        """Status of the process at its end, which may take `timeout_s` and the time that its memory takes."""
        return self._process.wait(timeout=timeout_s + self._unmap_s)

    def _release(self) -> None:
        self._socket.close()
        self._stderr.close()

    def _wait_for(self, events: int, failure: str) -> int:
        """Waits for `events` of the socket and returns those that are there; WorkerError has `failure`, what the worker did not do."""
        self._poll.register(self._socket, events)
        look_s = min(_LOOK_S, self._timeout_s / 20)
        left_s, n_looks = self._timeout_s, self._arena.n_looks
        while not (found := self._poll.poll(look_s * 1000)):
            # One that waits for a word looks at it, and one that hangs or is stopped does not.
            before, n_looks = n_looks, self._arena.n_looks
            # Not by a clock, which goes on while the trainer is stopped.
            left_s -= look_s if n_looks == before else 0
            if left_s <= 0:
                raise WorkerError(
                    f"{self} {failure} within {self._timeout_s:g} s; raise `worker_timeout` if it is"
                    f" only slow{self._quoted_stderr()}\nWorker: {self._arena.worker_state()}"
                )
        return found[0][1]

    def _read(self) -> None:
        """Reads the next message of the worker, which is there; an empty one means that it has closed its end."""
        try:
            self._inbox.append(self._socket.recv(native.MAX_MESSAGE_BYTES))
        except OSError as error:
            raise self._death() from error

    def _death(self) -> WorkerError:
        try:
            status = self._wait_for_end(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerError(f"{self} closed its connection but did not exit{self._quoted_stderr()}")
        if not self._is_ready and (reason := native.cannot_start(status, self._last_output())) is not None:
            return WorkerError(native.cannot_run(self._executable, reason))
        if status < 0:
            return WorkerKilled(f"{self} was killed by signal {-status}{self._quoted_stderr()}")
        return WorkerError(f"{self} exited with status {status}{self._quoted_stderr()}")

    def _quoted_stderr(self) -> str:
        text = self._last_output()
        return f"; its last output:\n{text}" if text else "; it had no output"

    def _last_output(self) -> str:
        fd = self._stderr.fileno()
        begin = max(0, os.fstat(fd).st_size - _STDERR_BYTES)
        return os.pread(fd, _STDERR_BYTES, begin).decode(errors="replace").strip()


@dataclass(kw_only=True, eq=False)
class Submission:
    """A message to the worker, and whether its answer has been read. Nothing but `SupervisedWorker` changes it."""

    message: JobMessage | native.Touch
    is_answered: bool = False


class SupervisedWorker:
    """A worker that is restarted when a signal kills it: the kernel's out-of-memory killer, an operator, a fault of its own.

    When the kernel has ended all threads of the dead process, so that none of them writes any more, a new worker starts on the same arena
    and gets all messages without an answer again, in order; jobs are idempotent (docs/how_it_works.md, "Death of the worker"). So it is
    where an exception from outside, such as `KeyboardInterrupt`, has cut an exchange between a system call and the record of it: the next
    exchange begins with a new worker. A message is recorded before it is sent, so none is lost.

    Other failures, and more than `max_restarts` within `RESTART_WINDOW_S`, are raised at once as WorkerError, and again at every later
    exchange, with `diagnosis`, the records of whoever submits. `current` is the present worker, which the owner ends.
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
        self.current = self._start()

    def enqueue(self, message: JobMessage | native.Touch) -> Submission:
        """Records a message, which `send` or a wait sends; no system call."""
        self._unanswered.append(Submission(message=message))
        return self._unanswered[-1]

    def send(self) -> None:
        """Sends what is enqueued; returns immediately unless the worker must be restarted."""
        while self._n_sent < len(self._unanswered):
            self._carry_out(self._send, self._telemetry.measure("restart"))

    def touch(self, offset: int, n_rows: int, row_bytes: int) -> None:
        """Allocates [offset, offset + n_rows * row_bytes) of the arena on the NUMA nodes of the worker's threads, and waits for it."""
        ids = {"type": native.MessageType.TOUCH, "request_id": next(self._request_ids)}
        self.wait_for(self.enqueue(native.Touch(**ids, offset=offset, n_rows=n_rows, row_bytes=row_bytes)))

    def wait_for(self, *submissions: Submission) -> None:
        """Waits for one of the answers, across restarts."""
        while not any(submission.is_answered for submission in submissions):
            self._carry_out(self._receive, nullcontext())

    def has_answered(self, submission: Submission) -> bool:
        """Whether `wait_for` would return immediately; reads the answers that are there, until this one."""
        self.send()
        while not submission.is_answered and self.current.has_answered():
            self._carry_out(self._receive, self._telemetry.measure("restart"))
            self.send()
        return submission.is_answered

    def restart(self) -> None:
        """Replaces the worker by a new one, which reads the arena's tables again; only while no job is in flight."""
        assert not self._unanswered, "restart requires a flush"
        self._is_cut = True
        self.current.close()
        self._replace()
        self._is_cut = False

    def _carry_out(self, exchange: Callable[[], None], while_replaced: AbstractContextManager[None]) -> None:
        """Exchanges messages with the worker, or replaces one that has been killed, in a context."""
        if self._failure is not None:
            raise WorkerError(str(self._failure)) from self._failure
        try:
            if self._is_cut:
                _log.info("an exception interrupted an exchange with the ZenFlow worker; a new worker continues")
                self._replace()
            self._is_cut = True
            try:
                exchange()
            except WorkerKilled as death:
                with while_replaced:
                    self._count(death)
                    self._replace()
            self._is_cut = False
        except WorkerError as failure:
            records = f"{len(self._unanswered)} messages without an answer, {self._n_sent} of them sent"
            self._failure = WorkerError(f"{failure}\nTrainer: {records}; {self.diagnosis()}")
            raise self._failure from failure

    def _send(self) -> None:
        while self._n_sent < len(self._unanswered):
            self.current.submit(self._unanswered[self._n_sent].message)
            self._n_sent += 1

    def _receive(self) -> None:
        self._send()
        answer = self.current.wait()
        submission = next((s for s in self._unanswered if _answers(answer, s.message)), None)
        if submission is None:
            raise WorkerError(f"{self.current} answered what it was not asked: {bytes(answer).hex(' ', 8)}")
        self._telemetry.counts.worker_busy_s += 1e-9 * answer.busy_ns
        submission.is_answered = True
        self._unanswered.remove(submission)
        self._n_sent -= 1

    def _replace(self) -> None:
        """Starts another worker, to which the next exchange sends what has no answer."""
        self.current.kill()
        self.current = self._start()
        self._unanswered = deque(s for s in self._unanswered if not s.is_answered)
        self._n_sent = 0

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
        self._telemetry.counts.worker_restarts += 1
        _log.warning("%s; a new worker continues, nothing is lost", death)


def _answers(answer: native.Answer, message: JobMessage | native.Touch) -> bool:
    if isinstance(answer, native.Done):
        return isinstance(message, JobMessage) and (answer.job_id, answer.block) == (message.job_id, message.block)
    return not isinstance(message, JobMessage) and answer.request_id == message.request_id
