"""`update_interval: auto` and `publish_lag: auto` in training: changes of schedule lose nothing; that ranks agree on them: test_ranks.

Slots and publish buffers that are used again within a step, and weights that are published within it: memory is as the schedule says, and
the same bits, whenever the worker is done.
"""

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from callbacks import At
from harness import APPROXIMATE, AUTO, EVERYTHING, RESELECTING, Case, Run, fit, make_trainer, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core import schedule as of_schedules
from lightning_zenflow.core.device import PAGE_BYTES
from lightning_zenflow.offload import plan as planning
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.plan import ScheduleControl
from lightning_zenflow.worker.machine import HOST_MEMORY
from lightning_zenflow.worker.process import SupervisedWorker
from models import SHAPES, LinearLossModule
from same_bits import assert_as_promised, assert_same_run
from scripted_schedule import scripted
from worker_killer import seen

ALL_AUTO = {**EVERYTHING, **AUTO}


def test_no_older_weights_are_shown_after_a_change_to_no_lag() -> None:
    """A job of the former lag is in flight when a block's next weights could come up in backward."""
    case = Case(steps=12, topk_ratio=0.0, schedules=((2, 1, 1), (7, 1, 0)), strategy_options=AUTO)
    late, immediate = run_here(case), run_here(replace(case, schedules=((1, 1, 0),)))
    torch.testing.assert_close(late.shown[8:], immediate.shown[8:], rtol=0, atol=0)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's deterministic algorithms, on for one test."""
    # For Trainer(deterministic=...), which sets it.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_repeat_whatever_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    """Measured times would change the schedule, in each run at other steps; with deterministic algorithms, they decide nothing."""
    case = Case(model="SmallNet", steps=14, max_norm=1.0, topk_ratio=0.3, strategy_options=ALL_AUTO)
    with caplog.at_level(logging.INFO), scripted(((3, 4, 1),)) as changes:
        first = run_here(case)
    with scripted(((6, 1, 1), (9, 2, 0))) as others:
        second = run_here(case)
    assert not changes and not others
    assert_same_run(first, second)
    (said,) = {message for message in caplog.messages if "deterministic" in message}
    assert "update_interval=1, publish_lag=0, offload_ratio=1.0, and no measured time changes them" in said
    torch.use_deterministic_algorithms(False)
    # Each training asks anew: the strategy keeps what the user has set.
    strategy, before = ZenFlowStrategy(worker_cores=1), ZenFlowConfig(worker_cores=1)
    trainer, model = make_trainer(strategy, deterministic="warn", max_steps=2), LinearLossModule(length=4)
    trainer.fit(model)
    assert strategy.zenflow_config == before.without_measurements()
    torch.use_deterministic_algorithms(False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model)
    assert trainer.global_step == 4
    assert strategy.zenflow_config == before


def test_changes_are_logged_and_memory_grows_with_the_interval_only(caplog: pytest.LogCaptureFixture) -> None:
    slots: list[int] = []
    note = At("on_train_batch_end", lambda t: slots.append(optimizer_of(t).training.parts.jobs.slots.n_slots))
    with caplog.at_level(logging.INFO), scripted(((3, 8, 1), (20, 1, 1))) as changes:
        fit(LinearLossModule(length=30), ZenFlowStrategy(worker_cores=1), steps=30, callbacks=[note])
    assert [schedule.update_interval for _, schedule in changes] == [8, 1]
    for step, schedule in changes:
        s, d = schedule.update_interval, schedule.publish_lag
        assert f"after step {step} update_interval={s}, publish_lag={d} " in caplog.text
    assert slots[0] < slots[5] == slots[-1]


@pytest.mark.parametrize(
    ("keys", "flush_after", "looks"),
    # Two steps are left out, and four measured; then two are, after the step that reads it, and four measured.
    [({}, (), [6, 13]), ({}, (3, 12), [8, 17]), ({"publish_lag": 1}, (), [9])],
    ids=["", "flushes", "with a lag three are left out, and steps 1 and 6, which select"],
)
def test_times_of_other_work_are_not_measured(
    keys: dict[str, Any], flush_after: tuple[int, ...], looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first steps, of steps around a flush, and of those that select columns."""
    steps, seen, end_step = [0], list[int](), ScheduleControl.end_step
    monkeypatch.setattr(ScheduleControl, "end_step", lambda *a: (steps.append(a[1].number), end_step(*a))[1])
    monkeypatch.setattr(planning, "load_and_stall", lambda _: seen.append(steps[-1]) or (0.5, 0.0))
    monkeypatch.setattr(planning, "_LOOK", 4)
    case = Case(steps=24, topk_ratio=0.3, strategy_options={**ALL_AUTO, **keys}, flush_after=flush_after)
    run_here(case)
    assert seen[: len(looks)] == looks


def test_schedules_without_memory_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for a few slots more than the first schedule takes, only windows of two steps and a lag of none are left besides."""
    reserved: list[int] = []
    note = At("on_train_batch_end", lambda t: reserved.append(optimizer_of(t).training.parts.rank.arena.reserved_bytes))
    with caplog.at_level(logging.INFO):
        fit(LinearLossModule(length=8), ZenFlowStrategy(worker_cores=1), steps=1, callbacks=[note])
        assert "leaves out" not in caplog.text
        # S = 1, d = 0 has 20 slots, S = 2, d = 0 has 32, S = 1, d = 1 as many, but a change from one to the other needs 40.
        monkeypatch.setenv(HOST_MEMORY, repr((reserved[0] + 14 * PAGE_BYTES) / 2**30))
        fit(LinearLossModule(length=8), ZenFlowStrategy(worker_cores=1), steps=1)
    (message,) = [message for message in caplog.messages if "leaves out" in message]
    every = {f"update_interval={1 << i}, publish_lag={d}" for i in range(5) for d in (0, 1)}
    kept = {f"update_interval={s}, publish_lag=0" for s in (1, 2)}
    assert set(message.partition(" for: ")[2].split("; ")) == every - kept


BUCKETS = {"reduce_bucket_size": 200, "worker_cores": 1}
CASE = Case(model="TiedNet", steps=9, topk_ratio=0.3, update_interval=1, publish_lag=0, strategy_options=BUCKETS)
CASES = {
    "S=1, d=0": CASE,
    "S=1, d=0, at the end": CASE.with_keys(overlap_step=False),
    "S=4, d=1": replace(CASE, update_interval=4, publish_lag=1, steps=13),
    "S=1, d=1": replace(CASE, publish_lag=1).with_keys(**APPROXIMATE),
}
COMMIT_EARLY = {
    "accumulation on the host, S=4": replace(CASE, update_interval=4, steps=13, accumulate=2).with_keys(
        accumulate_on="host", **APPROXIMATE
    ),
    "reselection": replace(CASE, update_interval=2).with_keys(**RESELECTING),
    "clipped, not finite": replace(
        CASE, model="LinearLossModule", max_norm=0.5, accumulate=2, model_options={"not_finite": {(4, 0): float("nan")}}
    ).with_keys(accumulate_on="host"),
    "flushes": replace(CASE, accumulate=2, flush_after=(3, 4, 7)).with_keys(accumulate_on="host"),
    "layers that are not used in every step": replace(CASE, model_options={"used_every": 3}),
}
"""Steps in which windows hold gradients that are shown already, and more blocks than usual need a slot at once."""

LATE = Case(steps=11, topk_ratio=0.3, max_norm=1.0, loop="direct").with_keys(**APPROXIMATE)
PUBLISHED = {
    "S=1, d=1, bf16": replace(LATE, update_interval=1, precision="bf16-true"),
    "reselection": LATE.with_keys(**EVERYTHING),
    "a network": replace(LATE, model="TiedNet", update_interval=2),
    "changes of schedule": replace(LATE, schedules=((3, 8, 1), (7, 1, 0), (9, 2, 1))).with_keys(**AUTO),
}
"""With weights that are copied to the model in backward, as soon as nothing reads them any more and the worker is done."""


def watch(case: Case, *answers: bool, few_blocks: int = 16) -> tuple[Run, dict[str, int]]:
    """Runs a case, checks what is promised of it, and counts jobs and early commits.

    Args:
        case: the case.
        answers: what the training thread sees before it waits, in turn: that the worker is done in time, or not. Without: whether it is.
        few_blocks: of a small model; with fewer, slots suffice in more cases.
    """
    turns = itertools.cycle(answers)
    counted = ((JobsInFlight, "enqueue"), (JobQueue, "_commit_early"))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as spies:
        calls = {
            name: spies.enter_context(mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)))
            for owner, name in counted
        }
        patch.setattr(of_schedules, "_FEW_BLOCKS", few_blocks)
        if answers:
            patch.setattr(SupervisedWorker, "has_answered", lambda self, job: seen(self, job, next(turns)))
        run = run_here(case)
        assert_as_promised(case, run)
    return run, {name: spy.call_count for name, spy in calls.items()}


@pytest.mark.parametrize("name", CASES)
def test_as_many_as_the_schedule_says_are_enough(name: str) -> None:
    """The worker is never seen to be done before it is waited for, as beside a device that runs behind the host. That as many are needed:
    tests/unit/core/test_schedule.
    """
    _, counts = watch(CASES[name], False)
    assert counts["_commit_early"] == 0


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "early"])
@pytest.mark.parametrize("name", COMMIT_EARLY)
def test_windows_that_commit_early(name: str, answers: bool) -> None:
    _, counts = watch(COMMIT_EARLY[name], answers)
    assert counts["_commit_early"] > 0


def test_a_flush_publishes_anew_only_what_may_not_be_exact() -> None:
    """Every window ends with a synchronous step."""
    case = replace(CASES["S=4, d=1"], warm_up=3, steps=3)
    exact, approximate = (watch(case.with_keys(**keys))[1]["enqueue"] for keys in ({}, APPROXIMATE))
    assert 3 * approximate == 4 * exact > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_same_bits_whenever_the_worker_is_done(name: str) -> None:
    in_turn = ((False,), (False, False, True), (True,))
    never, sometimes, always = (watch(PUBLISHED[name], *answers, few_blocks=8)[0] for answers in in_turn)
    early = [sum(in_backward for in_backward, _ in run.h2d_bytes) for run in (never, sometimes, always)]
    # Where slots are few (d = 0, submitted in backward), answers are waited for during backward.
    assert early[0] == 0 or name == "changes of schedule"
    assert early[0] <= early[1] and early[0] < early[2]
    for run in (sometimes, always):
        assert_same_run(run, never)


def test_nothing_is_left_for_the_end_of_the_step() -> None:
    """But for the jobs of the first step, which selects and is synchronous."""
    # Without the last parameter, which has no gradient in every second step.
    case = replace(LATE, model_options={"shapes": SHAPES[:6]})
    for in_backward, rest in watch(case, True, few_blocks=8)[0].h2d_bytes[2:]:
        assert in_backward > 0 and rest == 0
