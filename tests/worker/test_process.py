"""The worker process with the real executable: its start, or why it cannot, in words; its end, privileges and leftovers; memory."""

import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import torch

from direct_step import direct_step
from lightning_zenflow.kernels import base
from lightning_zenflow.native import MessageHeader, cannot_run, worker_executable
from lightning_zenflow.offload import build as assembly
from lightning_zenflow.offload.run_state import HostState
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena, arena_bytes
from lightning_zenflow.worker.machine import allowed_cores, running_on
from lightning_zenflow.worker.process import JobMessage, SupervisedWorker, Worker, WorkerError
from processes import arena_mappings, leaves_no_file_open
from recorded_device.tensors import CPU
from small_arena import SIZES, make_partition


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(make_partition(), SIZES, device=CPU)
    yield arena
    arena.close(keep_state=False)


@pytest.fixture
def two_cores() -> list[int]:
    """For a worker of two threads, which one core cannot have: each has a core of its own."""
    if len(cores := allowed_cores()[:2]) < 2:
        pytest.skip("needs two cores")
    return cores


@pytest.fixture
def worker(arena: Arena) -> Iterator[Worker]:
    worker = Worker(arena, cores=allowed_cores()[-1:], timeout_s=30, word_timeout_s=30)
    yield worker
    worker.kill()


def test_more_messages_than_the_socket_holds(worker: Worker) -> None:
    """Neither end waits in `send` for the other one to read; an error comes behind the answers."""
    n = 3000
    for job_id in range(1, n + 1):
        worker.submit(JobMessage(job_id=job_id, block=0, first_step=1, slots=[], publish_buffer=0))
    worker.submit(MessageHeader(type=77))
    assert [worker.wait().job_id for _ in range(n)] == list(range(1, n + 1))
    with pytest.raises(WorkerError, match="is_job"):
        worker.wait()


def test_a_worker_that_receives_nothing(worker: Worker) -> None:
    """Started in its own time, it is waited for briefly."""
    worker._timeout_s = 0.2
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="received no message within 0.2 s"):
        for job_id in range(1, 3000):
            worker.submit(JobMessage(job_id=job_id, block=0, first_step=1, slots=[], publish_buffer=0))


def test_a_worker_that_does_not_end(arena: Arena, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has to unmap its memory, which takes seconds for a terabyte."""
    wait = Mock(side_effect=subprocess.TimeoutExpired("zenflow-worker", 10))
    os.kill(worker.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(worker._process, "wait", wait)
        with pytest.raises(WorkerError, match="was killed but did not end within 10"):
            worker.close()
    unmap_s = os.fstat(arena.fd).st_size / 2**35
    assert wait.call_args_list == [call(timeout=1 + unmap_s), call(timeout=10 + unmap_s)]
    assert worker._socket.fileno() < 0


@pytest.mark.parametrize(("limit", "value"), [("OMP_THREAD_LIMIT", "1"), ("OMP_MAX_ACTIVE_LEVELS", "0")])
def test_limits_on_the_trainers_threads_and_cores(
    arena: Arena, two_cores: list[int], monkeypatch: pytest.MonkeyPatch, limit: str, value: str
) -> None:
    """They do not hold for the worker, of which each core has a thread."""
    monkeypatch.setenv(limit, value)
    with running_on(two_cores[:1]):
        worker = Worker(arena, cores=two_cores, timeout_s=30, word_timeout_s=30)
    threads = Path(f"/proc/{worker.pid}/task").iterdir()
    assert sorted([*os.sched_getaffinity(int(thread.name))] for thread in threads) == [[core] for core in two_cores]
    worker.close()


def test_nothing_is_left_open() -> None:
    def start_and_close(*, fail: bool) -> None:
        arena = Arena(make_partition(), SIZES, device=CPU)
        if fail:
            with pytest.raises(WorkerError, match="4000"):
                Worker(arena, cores=[4000], timeout_s=5, word_timeout_s=5)
        else:
            worker = Worker(arena, cores=allowed_cores()[:1], timeout_s=5, word_timeout_s=5)
            worker.close()
            worker.close()
            assert not psutil.pid_exists(worker.pid)
        arena.close(keep_state=False)
        arena.close(keep_state=False)

    start_and_close(fail=False)
    with leaves_no_file_open():
        for fail in (False, True):
            start_and_close(fail=fail)


def test_the_shared_memory_has_a_fixed_size(arena: Arena) -> None:
    """A process with the descriptor can neither grow the memory nor cut off mappings of others."""
    size = os.fstat(arena.fd).st_size
    assert arena_bytes(make_partition(), SIZES) == size
    for other in (2 * size, 0):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, other)


@pytest.mark.parametrize("dtype, n_bytes", [("float32", 12), ("bfloat16", 8)])
def test_states_are_there_before_the_trainer_writes(dtype: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker touches them at its start, on its own NUMA nodes, and no other memory."""
    seen = []

    def looks_first(*args: Any, arena: Arena, **kwargs: Any) -> HostState:
        seen.append((os.fstat(arena.fd), n_bytes * arena.master.numel()))
        return HostState(*args, arena=arena, **kwargs)

    monkeypatch.setattr(assembly, "HostState", looks_first)
    with direct_step([[torch.zeros(512, 512)]], publish_lag=1, moments_dtype=dtype):
        [(file, states)] = seen
    # Header and tables are the trainer's.
    assert states <= 512 * file.st_blocks < states + 10 * 4096 < file.st_size


def test_the_worker_has_what_it_needs_and_no_more(worker: Worker) -> None:
    """No new privileges; only the standard descriptors, the arena and its socket, which no program would inherit.

    A terminal sends signals (Ctrl-C, Ctrl-\\, Ctrl-Z) to the processes of the trainer's group, and SIGHUP to those of its session.
    """
    for ignored in (signal.SIGINT, signal.SIGHUP):
        os.kill(worker.pid, ignored)
    worker.submit(JobMessage(job_id=1, block=0, first_step=1, slots=[], publish_buffer=0))
    worker.wait()
    assert os.getpgid(worker.pid) != os.getpgid(0)
    assert os.getsid(worker.pid) != os.getsid(0)
    process = Path(f"/proc/{worker.pid}")
    status = (process / "status").read_text()
    assert "NoNewPrivs:\t1" in status
    shared = [fd.name for fd in (process / "fd").iterdir() if int(fd.name) > 2]
    assert len(shared) == 2
    for fd in shared:
        flags = next(line for line in (process / "fdinfo" / fd).read_text().splitlines() if line.startswith("flags:"))
        assert int(flags.split()[1], 8) & os.O_CLOEXEC


def test_no_process_dumps_the_arena(worker: Worker) -> None:
    for process in ("self", worker.pid):
        mappings = re.split(r"(?m)^(?=[0-9a-f]+-)", Path(f"/proc/{process}/smaps").read_text())
        arenas = [mapping for mapping in mappings if "zenflow-arena" in mapping]
        assert arenas and all(re.search(r"VmFlags:.* dd\b", mapping) for mapping in arenas)


FEW_THREADS = f"""#!{sys.executable}
import os, resource, sys
worker = os.open({str(worker_executable())!r}, os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.geteuid() == 0:  # which has no such limit
    os.setgid(65534)
    os.setuid(65534)
os.execve(worker, sys.argv, os.environ)
"""


def of_another_architecture(content: bytes) -> bytes:
    return content[:18] + (2).to_bytes(2, "little") + content[20:]  # e_machine: SPARC


with_bytes = partial(methodcaller, "replace")
CANNOT_RUN = "zenflow-worker cannot run on this machine .*: .*{}.*; .* build it here: `pip"
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another program": (lambda _: b"#!/bin/sh\nexec sleep 1000\n", "did not answer within 2 s; raise `worker_timeout`"),
    "an error": (lambda _: b"#!/bin/sh\necho 'no libc here' >&2\nexit 3\n", "exited with status 3.*no libc here"),
    "threads that the system refuses": (
        lambda _: FEW_THREADS.encode(),
        "with status .*last output:.*(Thread creation failed|Resource temporarily unavailable)",
    ),
    "another architecture": (of_another_architecture, CANNOT_RUN.format("Exec format error")),
    "newer glibc": (with_bytes(b"GLIBC_2.34\0", b"GLIBC_9.34\0"), CANNOT_RUN.format("version `GLIBC_9.34' not found")),
    "missing library": (
        with_bytes(b"libc.so.6\0", b"libx.so.6\0"),
        CANNOT_RUN.format("libx.so.6: cannot open shared object file"),
    ),
    "missing instruction": (lambda _: b"#!/bin/sh\nkill -ILL $$\n", CANNOT_RUN.format("SIGILL at its start")),
    "refused memory": (lambda _: b"#!/bin/sh\nkill -BUS $$\n", CANNOT_RUN.format("SIGBUS at its start, as by memory")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_executable_that_does_not_begin(
    name: str, arena: Arena, two_cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, message = DAMAGE[name]
    path = Path(shutil.copy(worker_executable(), tmp_path))
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(path))
    limit_s = 2 if name == "another program" else 30
    start = partial(Worker, arena, cores=two_cores, timeout_s=limit_s, word_timeout_s=30)
    with leaves_no_file_open():
        with pytest.raises(WorkerError, match=f"(?s){message}") as caught:
            SupervisedWorker(start, max_restarts=1, telemetry=Telemetry(CPU))
        assert "restarted" not in str(caught.value)
        assert "\n" not in str(caught.value) or "cannot run" not in message
        del caught


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(worker_executable(), tmp_path)
    (tmp_path / "libzenflow-device.so").touch()
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(tmp_path / "zenflow-worker"))
    message = "libzenflow-device.so cannot run on this machine .*: .*file too short.*; install a wheel"
    with pytest.raises(RuntimeError, match=message):
        base._library.__wrapped__()


def test_too_few_files_may_be_open() -> None:
    message = cannot_run(worker_executable(), OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert "raise the limit of open files (`ulimit -n`)" in message and "wheel" not in message


MIB = 2**20


class Garbage:
    """As a trainer of an earlier fit. A destructor in the child may wait for threads that the child does not have: that of Gloo does."""

    def __init__(self, *held: Any) -> None:
        self.itself, self.held, self.pid = self, held, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os._exit(3)


def test_a_child_that_collects_the_arena_of_an_earlier_fit() -> None:
    """The child's own memory is where the arena was, and stays there; nothing that the child inherits is collected."""
    gc.collect()
    before = set(arena_mappings())
    Garbage(Arena(make_partition(), replace(SIZES, n_slots=16 * MIB // 4096), device=CPU))
    (arena,) = set(arena_mappings()) - before

    def child() -> None:
        own: list[mmap.mmap] = []
        # Smaller holes may be filled first.
        while not own or not arena[0] <= ctypes.addressof(ctypes.c_char.from_buffer(own[-1])) < arena[1]:
            own.append(mmap.mmap(-1, 4 * MIB))
            own[-1][0] = len(own) % 256
            assert len(own) < 5000
        gc.collect()
        assert all(memory[0] == (i + 1) % 256 for i, memory in enumerate(own))

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join()
    assert forked.exitcode == 0
    gc.collect()
    assert arena not in arena_mappings()
