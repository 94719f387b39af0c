"""`update_interval: auto` and `publish_lag: auto` in training: changes of schedule lose nothing, and the ranks agree on them."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks import At
from harness import AUTO, EVERYTHING, Case, fit, make_trainer, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import PAGE_BYTES
from lightning_zenflow.offload import plan as planning
from lightning_zenflow.offload.plan import ScheduleControl
from lightning_zenflow.worker.machine import HOST_MEMORY
from models import LinearLossModule
from rank_processes import run_on_ranks
from same_bits import assert_is_adamw, assert_same_run
from scripted_schedule import scripted

ALL_AUTO = {**EVERYTHING, **AUTO, "select_interval": 5}
SCHEDULES = ((2, 8, 1), (11, 1, 0), (14, 16, 1), (20, 2, 1), (26, 1, 1), (29, 4, 0))
CASE = Case(steps=36, max_norm=1.0, topk_ratio=0.3, schedules=SCHEDULES, strategy_options=AUTO)


def test_no_older_weights_are_shown_after_a_change_to_no_lag() -> None:
    """A job of the former lag is in flight when a block's next weights could come up in backward."""
    case = replace(CASE, steps=12, max_norm=None, topk_ratio=0.0, schedules=((2, 1, 1), (7, 1, 0)))
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


def test_two_ranks_lose_nothing_and_agree() -> None:
    scripted = replace(CASE, strategy_options=ALL_AUTO)
    cases = {"scripted": scripted, "measured": replace(scripted, steps=24, schedules=())}
    runs = run_on_ranks(cases)
    for name, case in cases.items():
        assert_is_adamw(case, *runs[name])
    ours, theirs = runs["measured"]
    assert ours.schedules == theirs.schedules
    assert len(ours.schedules) == 24


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

    def note(trainer: pl.Trainer) -> None:
        parts = optimizer_of(trainer).training.parts
        reserved.append(parts.rank.arena.reserved_bytes)
        assert (parts.jobs.schedule.update_interval, parts.jobs.schedule.publish_lag) == (1, 0)

    def left_out() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            callbacks = [At("on_train_batch_end", note)]
            fit(LinearLossModule(length=8), ZenFlowStrategy(worker_cores=1), steps=1, callbacks=callbacks)
        return [message for message in caplog.messages if "leaves out" in message]

    assert left_out() == []
    # S = 1, d = 0 has 20 slots, S = 2, d = 0 has 32, S = 1, d = 1 as many, but a change from one to the other needs 40.
    monkeypatch.setenv(HOST_MEMORY, repr((reserved[0] + 14 * PAGE_BYTES) / 2**30))
    (message,) = left_out()
    every = {f"update_interval={1 << i}, publish_lag={d}" for i in range(5) for d in (0, 1)}
    kept = {f"update_interval={s}, publish_lag=0" for s in (1, 2)}
    assert set(message.partition(" for: ")[2].split("; ")) == every - kept
