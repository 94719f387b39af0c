"""A killed worker is restarted and the run has the same bits; one that fails or does not answer ends the run."""

import dataclasses
import logging
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from typing_extensions import override

from direct_step import direct_step
from harness import UP_TO_TWO, Case, run_here
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.native import Acknowledged, Done
from lightning_zenflow.offload import build
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from lightning_zenflow.worker.process import JobMessage, Submission, SupervisedWorker, Worker, WorkerError
from processes import is_alive, leaves_no_file_open, wait_for
from same_bits import assert_same_run
from small_arena import resolved
from worker_blocks import Blocks
from worker_killer import KillsWorker

# Large enough that the worker computes for a good part of the time in which it may be killed.
LARGE = {"shapes": ((601, 499), (211, 503), (997,))}
CASE = Case(steps=16, topk_ratio=0.05, max_norm=1.0, model_options=LARGE)


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(
            CASE,
            precision="bf16-true",
            strategy_options={"weight_prediction": 3.0, "worker_cores": UP_TO_TWO, "select_interval": 5},
        ),
        dataclasses.replace(CASE, update_interval=1, publish_lag=0),
        *(
            pytest.param(
                dataclasses.replace(CASE, steps=220, update_interval=s),
                marks=[pytest.mark.slow, pytest.mark.timeout(900)],
            )
            for s in (1, 4)
        ),
    ],
    ids=["replay by two threads, bf16", "submitted in backward", "S=1", "S=4"],
)
def test_killed_in_every_step(case: Case) -> None:
    killer = KillsWorker(seed=1)
    killed = run_here(case.with_keys(max_worker_restarts=10**6), callbacks=[killer])
    # Two kills may hit the same worker.
    assert killer.restarts >= case.steps // 2
    assert_same_run(killed, run_here(case))


def kill(worker: SupervisedWorker, number: int = signal.SIGKILL) -> None:
    pid = worker.current.pid
    os.kill(pid, number)
    wait_for(lambda: not is_alive(pid))


def submit(worker: SupervisedWorker, message: JobMessage) -> Submission:
    submission = worker.enqueue(message)
    worker.send()
    return submission


class Start:
    """Starts workers; those with the given numbers, counted from 0, are killed before they are ready."""

    def __init__(self, arena: Arena, *, killed: set[int] | None = None) -> None:
        self._arena = arena
        self._killed = killed or set()
        self.cores = allowed_cores()[:1]
        self.n = 0

    def __call__(self) -> Worker:
        self.n += 1
        options: dict[str, Any] = {"cores": self.cores, "timeout_s": 30.0, "word_timeout_s": 1800.0}
        return (KilledAtStart if self.n - 1 in self._killed else Worker)(self._arena, **options)


class KilledAtStart(Worker):
    @override
    def wait(self) -> Any:
        os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(self.pid))
        # A message that it sent before counts no more.
        self._socket.recv(1 << 16)
        return super().wait()


def supervised(start: Start, *, max_restarts: int = 3) -> tuple[SupervisedWorker, Telemetry]:
    stalls = Telemetry(torch.device("cpu"))
    return SupervisedWorker(start, max_restarts=max_restarts, telemetry=stalls), stalls


def jobs_of(blocks: Blocks, *, steps: int = 1) -> list[JobMessage]:
    for step in range(1, steps + 1):
        blocks.set_step(step)
        blocks.arrive(step, 1.0)
    numbers = range(len(blocks.partition.blocks))
    return [blocks.job(number, step, buffer=number) for step in range(1, steps + 1) for number in numbers]


def assert_done(blocks: Blocks, jobs: Sequence[JobMessage]) -> None:
    """The arena has the state behind these jobs, each applied once."""
    for job in jobs:
        blocks.expect(job, 1.0)
    blocks.assert_as_expected()


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    blocks = Blocks(n_blocks=3)
    yield blocks
    blocks.arena.close(keep_state=False)


def test_a_core_that_the_host_has_taken_away(blocks: Blocks) -> None:
    """A training goes on without it; at its start the core is refused (`test_nothing_is_left_open`)."""
    start = Start(blocks.arena)
    worker, _ = supervised(start)
    first, *rest = jobs_of(blocks, steps=3)
    worker.wait_for(submit(worker, first))
    start.cores = [4000]
    kill(worker)
    for job in rest:
        submit(worker, job)
    worker.current.close()
    assert_done(blocks, [first, *rest])


@pytest.mark.parametrize("seed", range(2))
def test_unread_acknowledgements_do_not_repeat_work(seed: int, blocks: Blocks) -> None:
    """Killed when some jobs are acknowledged, some acknowledgements read, and some jobs not begun."""
    worker, stalls = supervised(Start(blocks.arena), max_restarts=100)
    rng = random.Random(seed)
    jobs = jobs_of(blocks, steps=3)
    todo, unread = list(jobs), deque[Submission]()
    kills = 0
    while todo or unread:
        if todo and (not unread or rng.random() < 0.5):
            unread.append(submit(worker, todo.pop(0)))
        elif rng.random() < 0.4:
            worker.wait_for(unread.popleft())
        else:
            kill(worker)
            kills += 1
    worker.current.close()
    assert kills and stalls.counts.worker_restarts
    assert resolved(blocks.arena) == (3, 3)
    assert_done(blocks, jobs)


def test_killed_at_its_start(blocks: Blocks, caplog: pytest.LogCaptureFixture) -> None:
    start = Start(blocks.arena, killed={0, 2})
    with caplog.at_level(logging.WARNING), leaves_no_file_open():
        worker, stalls = supervised(start)
        os.kill(worker.current.pid, signal.SIGKILL)
        worker.wait_for(submit(worker, jobs_of(blocks)[0]))
        worker.current.close()
    assert start.n == 4
    assert stalls.counts.worker_restarts == 3
    assert sum("was killed by signal 9" in record.message for record in caplog.records) == 3


def test_the_last_words_of_one_that_dies_too_often(blocks: Blocks) -> None:
    start = Start(blocks.arena)
    worker, _ = supervised(start, max_restarts=2)
    (job, *_) = jobs_of(blocks)
    blocks.arena.step_words.zero_()
    with pytest.raises(WorkerError, match="(?s)was killed by signal 6.*restarted 2 times.*max_worker_restarts=2"):
        submit(worker, job)
        for _ in range(3):
            kill(worker, signal.SIGABRT)
            submit(worker, job)
    worker.current.kill()
    assert start.n == 3


def test_one_that_reports_an_error_is_not_replaced(blocks: Blocks) -> None:
    worker, stalls = supervised(Start(blocks.arena))
    job = JobMessage(job_id=1, block=77, first_step=1, slots=[], publish_buffer=0)
    with pytest.raises(WorkerError, match="failed: invalid input: check: job.block < "):
        worker.wait_for(submit(worker, job))
    worker.current.close()
    assert stalls.counts.worker_restarts == 0


@pytest.mark.parametrize(
    "answer",
    [Done(job_id=2, block=0), Done(job_id=1, block=1), Acknowledged(request_id=1)],
    ids=["job", "block", "kind"],
)
def test_an_answer_to_nothing_is_an_error(
    answer: Done | Acknowledged, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = supervised(Start(blocks.arena))
    job = submit(worker, jobs_of(blocks)[0])
    with monkeypatch.context() as patch, pytest.raises(WorkerError, match="answered what it was not asked"):
        patch.setattr(worker.current, "wait", lambda: answer)
        worker.wait_for(job)
    worker.current.kill()


def test_one_that_waits_for_other_ranks_is_waited_for(blocks: Blocks) -> None:
    """Beyond `worker_timeout`, until the word arrives. If it is stopped meanwhile, that ends the run, and what cannot exit is killed."""
    worker, stalls = supervised(Start(blocks.arena))
    pid = worker.current.pid
    assert psutil.Process(pid).cmdline()[-1] == "1800000"
    worker.current._timeout_s = 0.3
    (job, *_) = jobs_of(blocks)
    blocks.arena.step_words.zero_()
    arrival = threading.Timer(0.7, blocks.arrive, (1, 1.0))
    arrival.start()
    worker.wait_for(submit(worker, job))
    arrival.join()
    missing = submit(worker, dataclasses.replace(job, job_id=2, first_step=2))
    looks = blocks.arena.n_looks
    wait_for(lambda: blocks.arena.n_looks > looks)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="did not answer within 0.3 s; raise `worker_timeout`") as error:
        worker.wait_for(missing)
    assert "job 1 completed, step 1 resolved; waits for the word of step 2\n" in str(error.value)
    assert "Trainer: 1 messages without an answer, 1 of them sent" in str(error.value)
    worker.current.close()
    assert not psutil.pid_exists(pid)
    assert stalls.counts.worker_restarts == 0


def test_a_flush_that_fails_says_what_it_waits_for_and_ends_the_worker() -> None:
    with direct_step([[torch.ones(8, 8)]], update_interval=1, publish_lag=1, topk_ratio=0) as direct:
        worker = direct.parts.rank.worker
        worker.current._timeout_s, pid = 0.3, worker.current.pid
        os.kill(pid, signal.SIGSTOP)
        direct.backward([torch.ones(8, 8)])
        direct.step.step()
        waiting = (
            r"did not answer within 0.3 s.*\d+ jobs submitted; \d+ of \d+ slots and \d+ of .* buffers free.*job_id=1"
        )
        with pytest.raises(WorkerError, match=f"(?s){waiting}"):
            direct.training.flush()
        assert direct.training.closed and not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("world_size", "timeout", "expected"),
    [(1, timedelta(hours=2), 600), (2, timedelta(hours=2), 7200), (2, timedelta(seconds=5), 600), (2, None, 1800)],
)
def test_words_are_waited_for_as_long_as_collectives(
    world_size: int, timeout: timedelta | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "places_on_this_host", lambda place: ([place], 0))
    found = build.rank_resources(
        ZenFlowConfig(), torch.device("cpu"), ranks_on_host=1, world_size=world_size, timeout=timeout
    )
    assert found.word_timeout_s == expected
