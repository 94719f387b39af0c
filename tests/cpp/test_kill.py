"""A worker is killed at any instant and another one continues: the result must not depend on the instant.

The installed executable is single-stepped (ptrace), from before it reads its jobs until it has answered them. Whenever an instruction has
changed the arena, another worker gets a copy of it and all jobs again.
"""

import ctypes
import fcntl
import math
import mmap
import os
import signal
import subprocess
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_cpp import start

from lightning_zenflow import native
from lightning_zenflow.native import Tentative
from worker_blocks import Blocks

SINGLESTEP, SEIZE, INTERRUPT, WALL = 9, 0x4206, 0x4207, 0x40000000
"""Of ptrace and waitpid."""
SHORT, CODED = torch.bfloat16, torch.int8


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job for each of two blocks in an arena of three steps, perhaps with another one that shows its tentative step with the true factor.
    Blocks have more than one tile, and one is cut by a parameter group's end and padding.
    """

    steps: int
    """Of each job; the last one may be tentative, with the factor `predicted`. The true one is 0.5, and not finite in step 2."""
    ahead: float = 0.0
    tentative: Tentative = Tentative.NONE
    predicted: float = 0.25
    moments: torch.dtype = torch.float32
    newest_first: bool = False
    corrects: bool = False

    def prepare(self) -> tuple[bytes, list[bytes]]:
        """The arena before the jobs, and these."""
        blocks = Blocks(dtype=SHORT, moments=self.moments, newest_first=self.newest_first)
        for step, factor in ((1, 0.5), (2, math.nan), (3, 0.5)):
            blocks.set_step(step)
            blocks.arrive(step, factor)
        for block in range(2):
            blocks.arrive(self.steps, self.predicted, block)
        kinds = [(range(1, self.steps + 1), self.tentative)]
        if self.corrects:
            kinds.append(([self.steps], Tentative.CORRECTION))
        jobs = [
            blocks.job(block, *steps, tentative=tentative, buffer=block, ahead=self.ahead)
            for steps, tentative in kinds
            for block in range(2)
        ]
        image = os.pread(blocks.arena.fd, os.fstat(blocks.arena.fd).st_size, 0)
        blocks.arena.close(keep_state=False)
        return image, [bytes(job) for job in jobs]


class Execution:
    """A worker with an arena of its own."""

    def __init__(self, worker: Path, image: bytes) -> None:
        fd = os.memfd_create("zenflow-test-arena")
        os.write(fd, image)
        self.memory = mmap.mmap(fd, 0)
        self.header = native.ArenaHeader.from_buffer(self.memory)
        self.process, self.socket = start(worker, fd, word_timeout_ms=600_000, stderr=subprocess.DEVNULL)
        os.close(fd)
        assert native.Ready.from_buffer_copy(self.receive(native.MessageType.READY))

    def receive(self, kind: native.MessageType) -> bytes:
        message = self.socket.recv(native.MAX_MESSAGE_BYTES)
        assert native.MessageHeader.from_buffer_copy(message).type == kind, message[
            ctypes.sizeof(native.MessageHeader) :
        ]
        return message

    def result(self, messages: list[bytes]) -> bytes:
        """Everything that training reads, once the worker has answered all jobs: state, published weights, counts."""
        for message in messages:
            self.socket.send(message)
        done = [native.Done.from_buffer_copy(self.receive(native.MessageType.DONE)).job_id for _ in messages]
        assert sorted(done) == [native.UpdateJob.from_buffer_copy(message).job_id for message in messages]
        h = self.header
        assert h.begun_job == h.completed_job
        parts = (
            (h.step_records_offset, h.block_words_offset),
            (h.master_offset, None),
            (h.block_jobs_offset, h.block_jobs_offset + 16),
        )
        return b"".join(self.memory[begin:end] for begin, end in parts) + h.resolved_step.to_bytes(8, "little")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        del self.header
        self.memory.close()


SCENARIOS = {
    "a tentative update": Scenario(steps=1, tentative=Tentative.PREDICTED),
    "a window one behind": Scenario(steps=3, ahead=2.0, tentative=Tentative.PREDICTED),
    "one behind with short moments": Scenario(steps=2, tentative=Tentative.PREDICTED, moments=SHORT),
    "a window with short moments": Scenario(steps=3, ahead=2.0, moments=SHORT),
    "one behind in 8 bits": Scenario(steps=2, tentative=Tentative.PREDICTED, moments=CODED),
    "a window in 8 bits": Scenario(steps=3, ahead=2.0, moments=CODED),
    "a window": Scenario(steps=3, ahead=2.0),
    "one behind, newest first": Scenario(steps=2, tentative=Tentative.PREDICTED, newest_first=True),
    **{
        name: Scenario(**{"tentative": Tentative.PREDICTED, "newest_first": True, "corrects": True, **options})  # type: ignore[arg-type]
        for name, options in {
            "corrected in 8 bits": {"steps": 3, "moments": CODED},
            "corrected, newest first": {"steps": 3},
            "corrected, not finite": {"steps": 2},
            "corrected with short moments": {"steps": 3, "moments": SHORT},
            "predicted rightly": {"steps": 3, "predicted": 0.5},
            "true at once": {"steps": 3, "tentative": Tentative.TRUE_IF_KNOWN},
        }.items()
    },
    "publishing": Scenario(steps=0),
}


@pytest.mark.parametrize(
    "name", [name if "8 bits" in name else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]
)
def test_killed_at_any_instant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # All bytes are compared after each instruction.
    monkeypatch.setattr("lightning_zenflow.worker.arena.PAGE_BYTES", 64)
    worker, scenario = native.worker_executable(), SCENARIOS[name]
    image, messages = scenario.prepare()

    def result_of_next(image: bytes) -> bytes:
        execution = Execution(worker, image)
        result = execution.result(messages)
        execution.end()
        return result

    expected, stepped = result_of_next(image), Execution(worker, image)
    pid, header = stepped.process.pid, stepped.header
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def trace(request: int, *, stops: bool = True) -> None:
        assert ptrace(request, pid, None, None) == 0, os.strerror(ctypes.get_errno())
        assert not stops or os.WIFSTOPPED(os.waitpid(pid, WALL)[1])

    trace(SEIZE, stops=False)
    trace(INTERRUPT)
    for message in messages:
        stepped.socket.send(message)
    waiting, first, changes, in_progress, between = bytearray(4), 2 if scenario.newest_first else 1, 0, 0, 0
    image = stepped.memory[:]
    # After the last answer it waits for a message, and a single step would block.
    while int.from_bytes(waiting, "little") < len(messages) * ctypes.sizeof(native.Done):
        trace(SINGLESTEP)
        fcntl.ioctl(stepped.socket, termios.FIONREAD, waiting)
        if stepped.memory[:] == image:
            continue
        image, changes = stepped.memory[:], changes + 1
        in_progress += header.begun_job != header.completed_job
        between += header.begun_job == header.completed_job == first
        assert result_of_next(image) == expected, f"killed after {changes} changes of the arena, the result differs"
    # At least each vector of each block, and the marks between the jobs.
    assert in_progress >= 20 and between >= 1
    assert stepped.process.poll() is None
    os.kill(pid, signal.SIGKILL)
    del header
    stepped.end()
