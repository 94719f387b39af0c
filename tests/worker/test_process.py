"""The worker process with the real executable: start, end, privileges and leftovers; and the memory that it shares."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from direct_step import direct_step
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deepspeed import build as assembly
from lightning_zenflow.deepspeed.host_state import HostState
from lightning_zenflow.worker.arena import Arena, ArenaSizes, arena_bytes
from lightning_zenflow.worker.machine import allowed_cores, running_on
from lightning_zenflow.worker.process import JobMessage, Worker, WorkerError
from processes import leaves_no_file_open
from small_arena import make_arena


@pytest.fixture
def worker(arena: Arena) -> Iterator[Worker]:
    worker = Worker(arena, cores=allowed_cores()[-1:], timeout_s=30)
    yield worker
    worker.kill()


def test_more_messages_than_the_socket_holds(worker: Worker) -> None:
    """Neither end waits in `send` for the other one to read."""
    n = 3000
    for job_id in range(1, n + 1):
        worker.submit(JobMessage(job_id=job_id, block=0, first_step=1, slots=[], publish_buffer=0))
    assert [worker.wait().job_id for _ in range(n)] == list(range(1, n + 1))


@pytest.mark.parametrize(
    ("commands", "timeout_s", "message"),
    [
        ("exec sleep 1000", 0.2, "did not answer within 0.2 s; raise `worker_timeout`"),
        ("echo 'no libc here' >&2\nexit 3", 5, "(?s)exited with status 3.*no libc here"),
    ],
)
def test_an_executable_that_is_not_the_worker(
    commands: str, timeout_s: float, message: str, arena: Arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "worker"
    script.write_text(f"#!/bin/sh\n{commands}\n")
    script.chmod(0o755)
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(script))
    with pytest.raises(WorkerError, match=message):
        Worker(arena, cores=[0], timeout_s=timeout_s)


def test_a_worker_that_receives_nothing(worker: Worker) -> None:
    """Started in its own time, it is waited for briefly."""
    worker._timeout_s = 0.2
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="received no message within 0.2 s"):
        for job_id in range(1, 3000):
            worker.submit(JobMessage(job_id=job_id, block=0, first_step=1, slots=[], publish_buffer=0))


@pytest.mark.parametrize(("limit", "value"), [("OMP_THREAD_LIMIT", "1"), ("OMP_MAX_ACTIVE_LEVELS", "0")])
def test_limits_on_the_trainers_threads_and_cores(
    arena: Arena, two_cores: list[int], monkeypatch: pytest.MonkeyPatch, limit: str, value: str
) -> None:
    """They do not hold for the worker, of which each core has a thread."""
    monkeypatch.setenv(limit, value)
    with running_on(two_cores[:1]):
        worker = Worker(arena, cores=two_cores, timeout_s=30)
    threads = Path(f"/proc/{worker.pid}/task").iterdir()
    assert sorted([*os.sched_getaffinity(int(thread.name))] for thread in threads) == [[core] for core in two_cores]
    worker.close()


def test_nothing_is_left_open(partition: Partition) -> None:
    def start_and_close(*, fail: bool) -> None:
        arena = make_arena(partition)
        if fail:
            with pytest.raises(WorkerError, match="4000"):
                Worker(arena, cores=[4000], timeout_s=5)
        else:
            worker = Worker(arena, cores=allowed_cores()[:1], timeout_s=5)
            worker.close()
            worker.close()
            assert not psutil.pid_exists(worker.pid)
        arena.close(keep_state=False)
        arena.close(keep_state=False)

    start_and_close(fail=False)
    with leaves_no_file_open():
        for fail in (False, True):
            start_and_close(fail=fail)


def test_the_shared_memory_has_a_fixed_size(partition: Partition, arena: Arena) -> None:
    """A process with the descriptor can neither grow the memory nor cut off mappings of others."""
    sizes = ArenaSizes(n_param_groups=2, n_step_records=16, n_slots=16, n_publish_buffers=4, dtype=torch.float32)
    size = os.fstat(arena.fd).st_size
    assert arena_bytes(partition, sizes) == size
    for other in (2 * size, 0):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, other)


@pytest.mark.parametrize("dtype, n_bytes", [("float32", 12), ("bfloat16", 8)])
def test_states_are_there_before_the_trainer_writes(dtype: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker touches them at its start, on its own NUMA nodes, and no other memory."""
    seen = []

    class LooksFirst(HostState):
        def __init__(self, *args, arena, **kwargs) -> None:  # type: ignore[no-untyped-def]
            seen.append((os.fstat(arena.fd), n_bytes * arena.master.numel()))
            super().__init__(*args, arena=arena, **kwargs)

    monkeypatch.setattr(assembly, "HostState", LooksFirst)
    with direct_step([[torch.zeros(512, 512)]], publish_lag=1, moments_dtype=dtype):
        [(file, states)] = seen
    # Header and tables are the trainer's.
    assert states <= 512 * file.st_blocks < states + 10 * 4096 < file.st_size


def test_the_worker_has_what_it_needs_and_no_more(worker: Worker) -> None:
    """No new privileges; only the standard descriptors, the arena and its socket, which no program would inherit.

    A terminal sends signals (Ctrl-C, Ctrl-\\, Ctrl-Z) to the processes of the trainer's group, and SIGHUP to those of its session.
    """
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
