"""The worker process with the real executable: numbers, errors, death, and leftovers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena, ArenaSizes, arena_bytes
from lightning_zenflow.worker.process import JobMessage, Worker, WorkerError
from lightning_zenflow.worker.topology import allowed_cores
from processes import is_alive, leaves_no_file_open, wait_for
from reference import Group, adamw_reference
from small_arena import GROUPS, fill_slot, gradient_of, make_arena, make_partition, write_step


@pytest.fixture
def partition() -> Partition:
    return make_partition()


@pytest.fixture
def arena(partition: Partition) -> Iterator[Arena]:
    arena = make_arena(partition)
    yield arena
    arena.close(keep_state=False)


@pytest.fixture
def worker(arena: Arena) -> Iterator[Worker]:
    worker = Worker(arena, cores=allowed_cores()[-1:], timeout_s=30)
    yield worker
    worker.kill()


@pytest.fixture
def impatient(worker: Worker) -> Worker:
    """A worker that has started in its own time, whose answers are waited for briefly."""
    worker._timeout_s = 0.2
    return worker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_jobs_give_the_oracles_numbers(partition: Partition, dtype: torch.dtype, n_threads: int) -> None:
    arena = make_arena(partition, dtype)
    initial = arena.master.clone()
    worker = Worker(arena, cores=(allowed_cores() * 2)[:n_threads], timeout_s=30)
    # Windows of 3, 1 and 2 steps; step 4 has a gradient that is not finite, and is skipped.
    factors = {1: 1.0, 2: 0.25, 3: 1.0, 4: float("nan"), 5: 0.5, 6: 1.0}
    slot = 0
    job_id = 0
    for window in ([1, 2, 3], [4], [5, 6]):
        for step in window:
            write_step(arena, step, factor=factors[step])
        for block in range(len(partition.blocks)):
            slots = []
            for step in window:
                fill_slot(arena, partition, block, slot, step)
                slots.append(slot)
                slot = (slot + 1) % arena.slots.shape[0]
            job_id += 1
            worker.submit(
                JobMessage(job_id=job_id, block=block, first_step=window[0], slots=slots, publish_buffer=job_id % 4)
            )
            assert worker.wait().job_id == job_id
            b = partition.blocks[block]
            published = arena.publish[job_id % 4, : b.end - b.begin]
            for s in partition.slices:
                begin, end = max(s.begin, b.begin), min(s.end, b.end)
                if begin < end:
                    expected = arena.master[begin:end].to(dtype)
                    assert torch.equal(published[begin - b.begin : end - b.begin], expected)
    assert arena.resolved == (6, 5)
    worker.close()

    applied = [step for step in factors if step != 4]
    exact = adamw_reference(
        [initial[s.begin : s.end] for s in partition.slices],
        [
            [gradient_of(partition, step, dtype).double()[s.begin : s.end] * factors[step] for s in partition.slices]
            for step in applied
        ],
        [[Group(**{key: getattr(h, key) for key in Group.__dataclass_fields__}) for h in GROUPS] for _ in applied],
    )
    for i, s in enumerate(partition.slices):
        for ours, theirs in (
            (arena.master, exact.weights),
            (arena.exp_avg, exact.exp_avg),
            (arena.exp_avg_sq, exact.exp_avg_sq),
        ):
            # float32 with a few roundings a step, against float64.
            torch.testing.assert_close(ours[s.begin : s.end].double(), theirs[i], rtol=1e-6, atol=1e-6)
    # Padding is never touched.
    padding = torch.ones(partition.numel, dtype=torch.bool)
    for s in partition.slices:
        padding[s.begin : s.end] = False
    assert torch.equal(arena.master[padding], initial[padding])
    assert not arena.exp_avg[padding].any()
    arena.close(keep_state=False)


def test_the_workers_error_reaches_the_caller(arena: Arena, worker: Worker) -> None:
    worker.submit(JobMessage(job_id=1, block=3, first_step=1, slots=[0], publish_buffer=0))
    with pytest.raises(WorkerError, match=f"(?s)process {worker.pid}.*failed.*block must be below n_blocks = 3, got 3"):
        worker.wait()
    wait_for(lambda: not is_alive(worker.pid))
    with pytest.raises(WorkerError, match="exited with status 1"):
        worker.wait()


def test_a_killed_worker_is_named_with_its_signal(arena: Arena, worker: Worker) -> None:
    """Where an answer is waited for and where a job is submitted."""
    write_step(arena, 1, seal=False)
    worker.submit(JobMessage(job_id=1, block=0, first_step=1, slots=[0], publish_buffer=0))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed by signal 9"):
        worker.wait()
    with pytest.raises(WorkerError, match="was killed by signal 9"):
        worker.submit(JobMessage(job_id=2, block=0, first_step=1, slots=[0], publish_buffer=0))


def test_more_messages_than_the_socket_holds(arena: Arena) -> None:
    """Neither end waits in `send` for the other one to read."""
    worker = Worker(arena, cores=allowed_cores()[:1], timeout_s=20)
    n = 3000
    for job_id in range(1, n + 1):
        worker.submit(JobMessage(job_id=job_id, block=0, first_step=1, slots=[], publish_buffer=0))
    assert [worker.wait().job_id for _ in range(n)] == list(range(1, n + 1))
    worker.close()


def test_a_worker_that_does_not_answer(impatient: Worker) -> None:
    os.kill(impatient.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="did not answer within 0.2 s; raise `worker_timeout`"):
        impatient.wait()
    impatient.kill()
    assert not is_alive(impatient.pid)


def a_script(folder: Path, commands: str) -> str:
    """A program in the place of the worker."""
    script = folder / "worker"
    script.write_text(f"#!/bin/sh\n{commands}\n")
    script.chmod(0o755)
    return str(script)


def test_a_worker_that_is_never_ready(arena: Arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", a_script(tmp_path, "exec sleep 1000"))
    with pytest.raises(WorkerError, match="did not answer within 0.2 s; raise `worker_timeout`"):
        Worker(arena, cores=[0], timeout_s=0.2)


@pytest.mark.parametrize(("limit", "value"), [("OMP_THREAD_LIMIT", "1"), ("OMP_MAX_ACTIVE_LEVELS", "0")])
def test_limits_on_the_trainers_threads(arena: Arena, monkeypatch: pytest.MonkeyPatch, limit: str, value: str) -> None:
    monkeypatch.setenv(limit, value)
    Worker(arena, cores=(allowed_cores() * 2)[:2], timeout_s=30).close()


def test_an_executable_that_is_not_the_worker(arena: Arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", a_script(tmp_path, "echo 'no libc here' >&2\nexit 3"))
    with pytest.raises(WorkerError, match="(?s)exited with status 3.*no libc here"):
        Worker(arena, cores=[0], timeout_s=5)


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
        for fail in (False, True, False, True):
            start_and_close(fail=fail)


def test_close_lets_the_worker_finish(arena: Arena, partition: Partition, worker: Worker) -> None:
    write_step(arena, 1)
    before = arena.master.clone()
    for block in range(len(partition.blocks)):
        fill_slot(arena, partition, block, block, 1)
        worker.submit(JobMessage(job_id=1 + block, block=block, first_step=1, slots=[block], publish_buffer=block))
    worker.close()
    for s in partition.slices:
        assert (arena.master[s.begin : s.end] != before[s.begin : s.end]).all()


def test_the_state_outlives_the_arena(partition: Partition) -> None:
    arena = make_arena(partition)
    master, expected = arena.master, arena.master.clone()
    arena.close(keep_state=True)
    del arena
    assert torch.equal(master, expected)


def test_arena_bytes(partition: Partition, arena: Arena) -> None:
    sizes = ArenaSizes(n_param_groups=2, n_step_records=16, n_slots=16, n_publish_buffers=4, dtype=torch.float32)
    assert arena_bytes(partition, sizes) == os.fstat(arena.fd).st_size


def test_slots_and_buffers_are_reserved_as_needed(arena: Arena) -> None:
    arena.reserve(n_slots=0, n_publish_buffers=0)
    state = arena.reserved_bytes
    row_bytes = arena.slots.shape[1] * arena.slots.element_size()
    sizes = []
    for n_slots, n_buffers in ((3, 1), (3, 1), (2, 1), (10, 2), (16, 4), (1, 1)):
        arena.reserve(n_slots=n_slots, n_publish_buffers=n_buffers)
        sizes.append(arena.reserved_bytes - state)
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1] == sizes[2]
    assert 4 * row_bytes <= sizes[0] < 4 * row_bytes + 2 * 4096
    assert arena.reserved_bytes == os.fstat(arena.fd).st_size, "each byte once"


def test_the_shared_memory_has_a_fixed_size(arena: Arena) -> None:
    """A process with the descriptor can neither grow the memory nor cut off mappings of others."""
    size = os.fstat(arena.fd).st_size
    for other in (2 * size, 0):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, other)


def test_the_worker_has_what_it_needs_and_no_more(worker: Worker) -> None:
    """No new privileges, sockets or programs; only the standard descriptors, the arena and its socket, which no program would inherit.

    A terminal sends signals (Ctrl-C, Ctrl-\\, Ctrl-Z) to the processes of the trainer's group, and SIGHUP to those of its session.
    """
    assert os.getpgid(worker.pid) != os.getpgid(0)
    assert os.getsid(worker.pid) != os.getsid(0)
    process = Path(f"/proc/{worker.pid}")
    status = (process / "status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status, "a filter; csrc/worker/privileges.cpp has what it refuses"
    shared = [fd.name for fd in (process / "fd").iterdir() if int(fd.name) > 2]
    assert len(shared) == 2
    for fd in shared:
        flags = next(line for line in (process / "fdinfo" / fd).read_text().splitlines() if line.startswith("flags:"))
        assert int(flags.split()[1], 8) & os.O_CLOEXEC
