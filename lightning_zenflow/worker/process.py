"""The worker process as the trainer sees it: start, submit, wait, close. The messages are those of ``csrc/protocol.h``.

The worker is an executable of its own (C++, no Python) that inherits two file descriptors: the arena's and one end of a
socket pair. When the trainer dies in whatever way, the kernel closes its end and the worker leaves; when the worker dies, the
trainer's next wait sees the end of the stream and raises with the worker's last words. `lightning_zenflow.worker.supervisor` starts another.
"""

import ctypes
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zenflow.native import protocol
from lightning_zenflow.native.paths import worker_executable
from lightning_zenflow.telemetry.counters import Completion
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.fork_safety import MEMORY_PREFIX, keep_from_children

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0

_EXIT_TIMEOUT_S = 1.0
"""What a worker that is asked to exit may need; nothing is lost when it is killed instead."""

_DEATH_TIMEOUT_S = 10.0
"""What the kernel may need to end a process and to give back its memory."""

_LAST_WORDS_BYTES = 4096


class WorkerError(RuntimeError):
    """The worker failed, died or did not answer in time; the message holds its own words where it left any."""


class WorkerKilled(WorkerError):
    """A signal has ended the worker: whatever it was about, another one can go on in the same memory."""


@dataclass(frozen=True, kw_only=True)
class JobMessage:
    """A round as it is handed over: the fields of ``zenflow::Round``, which says what they mean."""

    job_id: int
    block: int
    first_step: int
    slots: Sequence[int]
    publish_buffer: int
    prediction_steps: float = 0.0
    in_backward: bool = False

    def message(self) -> bytes:
        """As it goes over the socket."""
        header = protocol.Round(
            type=protocol.MessageType.ROUND,
            block=self.block,
            round_id=self.job_id,
            first_step=self.first_step,
            n_steps=len(self.slots),
            publish_buffer=self.publish_buffer,
            rule=protocol.Rule.REPLAY,
            look_ahead=self.prediction_steps,
            n_updates=0,
            early=self.in_backward,
        )
        return bytes(header) + bytes((ctypes.c_uint32 * len(self.slots))(*self.slots))


class Worker:
    """Owner of the worker process and of the trainer's end of the socket.

    Args:
        arena: the shared memory, with header and tables filled in.
        cores: logical cores, one thread pinned to each.
        timeout_s: longest wait for an answer, and the worker's own longest wait for a step's data.

    Raises:
        WorkerKilled: a signal ended it before it was ready.
        WorkerError: it could not be started.
    """

    def __init__(self, arena: Arena, *, cores: Sequence[int], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep_from_children(self._socket)
        self._answers = select.poll()
        self._answers.register(self._socket, select.POLLIN)
        # A file in memory rather than a pipe: nobody has to read it while the worker lives.
        self._stderr_fd = os.memfd_create(MEMORY_PREFIX + "worker-stderr", os.MFD_CLOEXEC)
        # Idle OpenMP threads must sleep: their cores may be the data loaders' in the meantime.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_DYNAMIC": "false"}
        # A limit that was meant for the trainer's libraries; the worker has as many threads as it has cores.
        environment.pop("OMP_THREAD_LIMIT", None)
        command = [
            str(worker_executable()),
            "--arena-fd", str(arena.fd),
            "--socket-fd", str(remote.fileno()),
            "--cores", ",".join(map(str, cores)),
            "--word-timeout-ms", str(max(1, round(timeout_s * 1000))),
        ]  # fmt: skip
        with remote:
            self._process = subprocess.Popen(
                command,
                pass_fds=(arena.fd, remote.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=self._stderr_fd,
                stderr=self._stderr_fd,
                env=environment,
                start_new_session=True,
            )
        try:
            ready = protocol.Ready.from_buffer_copy(self._receive(protocol.MessageType.READY, _START_TIMEOUT_S))
            if ready.version != protocol.VERSION:
                raise WorkerError(
                    f"the ZenFlow worker speaks protocol {ready.version}, this package {protocol.VERSION}: reinstall lightning-zenflow"
                )
        except BaseException:
            self.kill()
            raise
        _log.debug("worker %d runs on cores %s", self._process.pid, list(cores))

    @property
    def pid(self) -> int:
        """Process number of the worker."""
        return self._process.pid

    def submit(self, submission: JobMessage) -> None:
        """Hands a round over; returns at once.

        Raises:
            WorkerKilled: a signal has ended the worker.
            WorkerError: it has ended otherwise, or takes no messages.
        """
        self._send(submission.message())

    def wait(self) -> Completion:
        """Waits for the oldest round that has not been answered yet.

        Raises:
            WorkerKilled: a signal has ended the worker.
            WorkerError: it failed and says how, has ended otherwise, or does not answer in time.
        """
        message = self._receive(protocol.MessageType.DONE, self._timeout_s)
        done = protocol.Done.from_buffer_copy(message)
        threads = (protocol.ThreadSpan * done.n_spans).from_buffer_copy(message, ctypes.sizeof(protocol.Done))
        return Completion(
            job_id=done.round_id,
            start_ns=done.start_ns,
            wait_ns=done.wait_ns,
            busy_ns=done.busy_ns,
            threads=threads,
        )

    def has_answered(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return bool(self._answers.poll(0))

    def close(self) -> None:
        """Asks the worker to exit once it is through with what it has, and waits for it; kills it if it does not."""
        if self._process.poll() is None:
            try:
                self._send(bytes(protocol.MessageHeader(type=protocol.MessageType.EXIT)))
                self._process.wait(timeout=_EXIT_TIMEOUT_S)
            except (WorkerError, subprocess.TimeoutExpired):
                _log.warning("the ZenFlow worker (process %d) did not exit when asked to and is killed", self.pid)
        self.kill()

    def kill(self) -> None:
        """Ends the worker now and frees everything that belonged to it. May be called again."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_DEATH_TIMEOUT_S)
        self._socket.close()
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
            self._stderr_fd = -1

    def _send(self, message: bytes) -> None:
        # The socket's buffer holds far more jobs than are ever in flight; a full one means that the worker has stopped reading.
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.send(message)
        except TimeoutError as error:
            raise WorkerError(
                f"the ZenFlow worker (process {self.pid}) took no message within {self._timeout_s:g} s"
            ) from error
        except OSError as error:
            raise self._death() from error

    def _receive(self, expected: protocol.MessageType, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        if not self._answers.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WorkerError(
                f"the ZenFlow worker (process {self.pid}) did not answer within {timeout_s:g} s;"
                " `worker_timeout` sets how long to wait" + self._quoted_stderr()
            )
        try:
            message = self._socket.recv(protocol.MAX_MESSAGE_BYTES)
        except OSError as error:
            raise self._death() from error
        if not message:
            raise self._death()
        kind = protocol.MessageHeader.from_buffer_copy(message).type
        if kind == protocol.MessageType.ERROR:
            text = message[ctypes.sizeof(protocol.MessageHeader) :].decode(errors="replace")
            raise WorkerError(f"the ZenFlow worker (process {self.pid}) failed: {text}")
        if kind != expected:
            raise WorkerError(f"the ZenFlow worker sent message {kind} where {expected.name} was expected")
        return message

    def _death(self) -> WorkerError:
        """What to raise about a worker that has closed its end."""
        try:
            status = self._process.wait(timeout=_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            how = "closed its connection but did not exit"
            return WorkerError(f"the ZenFlow worker (process {self.pid}) {how}{self._quoted_stderr()}")
        if status < 0:
            how = f"was killed by signal {-status}"
            return WorkerKilled(f"the ZenFlow worker (process {self.pid}) {how}{self._quoted_stderr()}")
        return WorkerError(
            f"the ZenFlow worker (process {self.pid}) exited with status {status}{self._quoted_stderr()}"
        )

    def _quoted_stderr(self) -> str:
        size = os.fstat(self._stderr_fd).st_size
        text = (
            os.pread(self._stderr_fd, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
            .decode(errors="replace")
            .strip()
        )
        return f"; its last words:\n{text}" if text else "; it left no message"
