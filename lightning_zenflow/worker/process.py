"""The worker process: start, submit, wait, close. ``csrc/common/protocol.h`` specifies the messages.

The worker is a C++ executable that inherits two file descriptors: the arena's and one end of a socket pair. When the trainer dies, the
kernel closes its end and the worker exits. When the worker dies, the trainer's next wait sees the end of the stream.
"""

import ctypes
import errno
import logging
import os
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zenflow import native
from lightning_zenflow.core.process import MEMORY_PREFIX, kept_from_children
from lightning_zenflow.native import cannot_run, worker_executable
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


class WorkerError(RuntimeError):
    """The worker failed, died or did not answer in time. The message contains its last output, if any."""


class WorkerTimeout(WorkerError):
    """The worker did not answer, or received no message, in time."""


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


Answer = native.Ready | native.Done | native.Acknowledged

_ANSWERS: dict[int, type[Answer]] = {
    native.MessageType.READY: native.Ready,
    native.MessageType.DONE: native.Done,
    native.MessageType.ACKNOWLEDGED: native.Acknowledged,
}


def worker_environment() -> dict[str, str]:
    """Environment variables of the worker's executable."""
    # Such limits are meant for the trainer's libraries; the worker has one thread per core.
    limits = ("OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")
    inherited = {name: value for name, value in os.environ.items() if name not in limits}
    # Idle OpenMP threads must sleep: data loaders may use their cores.
    return {**inherited, "OMP_WAIT_POLICY": "passive", "OMP_DYNAMIC": "false"}


class Worker:
    """Owner of the worker process and of the trainer's end of the socket. The start and every exchange raise WorkerError where the worker
    fails, exits, or cannot be started, WorkerKilled where a signal ends it, and WorkerTimeout.

    Each of the `cores` has one pinned thread. `timeout_s` limits the start and each wait for an answer, without the time in which the
    worker waits for a word of the device or of other ranks; that `word_timeout_s` limits, None: `timeout_s`.
    """

    def __init__(
        self, arena: Arena, *, cores: Sequence[int], timeout_s: float, word_timeout_s: float | None = None
    ) -> None:
        self._arena = arena
        self._timeout_s = timeout_s
        self._unmap_s = os.fstat(arena.fd).st_size / _UNMAPPED_BYTES_PER_S
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept_from_children.update((self._socket, remote))
        self._answers, self._room = select.poll(), select.poll()
        self._answers.register(self._socket, select.POLLIN)
        self._room.register(self._socket, select.POLLIN | select.POLLOUT)
        self._inbox: deque[bytes] = deque()  # answers that were read to make room for a message
        # A memory file instead of a pipe: it need not be drained while the worker runs.
        self._stderr = os.fdopen(os.memfd_create(MEMORY_PREFIX + "worker-stderr", os.MFD_CLOEXEC), "rb", buffering=0)
        self._executable = worker_executable()
        self._is_ready = False
        word_timeout_ms = max(1, round(1000 * (word_timeout_s or timeout_s)))
        arguments = arena.fd, remote.fileno(), ",".join(map(str, cores)), word_timeout_ms
        command = [str(self._executable), *map(str, arguments)]
        with remote:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(arena.fd, remote.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    env=worker_environment(),
                    start_new_session=True,
                )
            except BaseException as error:
                # Without its socket, a process that was started nevertheless ends by itself.
                self._release()
                if not isinstance(error, OSError):
                    raise
                if error.errno == errno.EAGAIN:  # a limit of processes
                    raise WorkerError(f"the ZenFlow worker could not be started: {error}") from error
                raise WorkerError(cannot_run(self._executable, error.strerror or str(error))) from error
        try:
            # The start takes as long as the system needs to allocate the states, 12 bytes a parameter.
            ready = self.wait()
            # A worker of another release refuses the arena's version before.
            assert isinstance(ready, native.Ready) and ready.n_threads == len(cores), "one thread for each core"
        except BaseException:
            self.kill()
            raise
        self._is_ready = True
        _log.debug("worker %d runs on cores %s", self._process.pid, list(cores))

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
            if self._wait_for(self._room, "received no message") & select.POLLIN:
                self._inbox.append(self._read())

    def wait(self) -> Answer:
        """Waits for the next answer."""
        if self._inbox:
            message = self._inbox.popleft()
        else:
            self._wait_for(self._answers, "did not answer")
            message = self._read()
        if not message:
            raise self._death()
        kind = native.MessageHeader.from_buffer_copy(message).type
        if kind == native.MessageType.ERROR:
            text = message[ctypes.sizeof(native.MessageHeader) :].decode(errors="replace")
            raise WorkerError(f"{self} failed: {text}")
        return _ANSWERS[kind].from_buffer_copy(message)

    def has_answered(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return bool(self._inbox or self._answers.poll(0))

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
            if self._process.poll() is None:
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

    def _wait_for(self, condition: select.poll, failure: str) -> int:
        """Waits for an event of the socket and returns it; WorkerTimeout has `failure`, what the worker did not do.

        The limit does not count the time in which the worker looks at a word that is missing. A worker that hangs or is stopped does not
        look.
        """
        look_s = min(_LOOK_S, self._timeout_s / 20)
        left_s, n_looks = self._timeout_s, self._arena.n_looks
        while not (events := condition.poll(look_s * 1000)):
            before, n_looks = n_looks, self._arena.n_looks
            # Not by a clock, which goes on while the trainer is stopped.
            left_s -= look_s if n_looks == before else 0
            if left_s <= 0:
                raise WorkerTimeout(
                    f"{self} {failure} within {self._timeout_s:g} s; raise `worker_timeout` if it is"
                    f" only slow{self._quoted_stderr()}\nWorker: {self._arena.worker_state()}"
                )
        return events[0][1]

    def _read(self) -> bytes:
        """Next message of the worker, which is there; an empty one means that it has closed its end."""
        try:
            return self._socket.recv(native.MAX_MESSAGE_BYTES)
        except OSError as error:
            raise self._death() from error

    def _death(self) -> WorkerError:
        """The error for a worker that has closed its end."""
        try:
            status = self._wait_for_end(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerError(f"{self} closed its connection but did not exit{self._quoted_stderr()}")
        reason = None if self._is_ready else _why_it_cannot_start(status, self._last_output())
        if reason is not None:
            return WorkerError(cannot_run(self._executable, reason))
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


def _why_it_cannot_start(status: int, output: str) -> str | None:
    """Why a worker ended before it was ready, if the program does not suit the machine; None otherwise."""
    if -status in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGSYS):
        refused = "memory that the system refuses (with vm.overcommit_memory=2: raise vm.overcommit_ratio)"
        cause = refused if -status == signal.SIGBUS else "an instruction that the CPU lacks"
        return f"{signal.Signals(-status).name} at its start, as by {cause}, or by an incomplete file"
    if status > 0 and ("GLIBC" in output or "while loading shared libraries" in output):
        return output.splitlines()[0]
    return None
