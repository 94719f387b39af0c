"""Slots and publish buffers that are used again within a step, and weights that are published within it: memory is as the schedule says,
and the same bits, whenever the worker is done."""

import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from harness import APPROXIMATE, AUTO, EVERYTHING, RESELECTING, Case, Run, run_here
from lightning_zenflow.core import schedule as of_schedules
from lightning_zenflow.core.schedule import StaggeredSchedule
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.worker.process import SupervisedWorker
from models import SHAPES
from same_bits import assert_same_run, assert_same_state
from worker_killer import seen

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


def watch(case: Case, *answers: bool, more: int = 0, few_blocks: int = 16) -> tuple[Run, Counter[str]]:
    """Runs a case, and counts jobs and early commits.

    Args:
        case: the case.
        answers: what the training thread sees before it waits, in turn: that the worker is done in time, or not. Without: whether it is.
        more: slots and buffers beyond the schedule's number.
        few_blocks: of a small model; with fewer, slots suffice in more cases.
    """
    counts, turns = Counter[str](), itertools.cycle(answers)
    n_slots, n_buffers = StaggeredSchedule.n_slots.fget, StaggeredSchedule.n_publish_buffers.fget
    assert n_slots is not None and n_buffers is not None

    def count(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        patch.setattr(owner, name, counted)

    with pytest.MonkeyPatch.context() as patch:
        count(patch, JobsInFlight, "enqueue")
        count(patch, JobQueue, "_commit_early")
        patch.setattr(of_schedules, "_FEW_BLOCKS", few_blocks)
        patch.setattr(StaggeredSchedule, "n_slots", property(lambda s: n_slots(s) + more))
        patch.setattr(StaggeredSchedule, "n_publish_buffers", property(lambda s: n_buffers(s) + more))
        if answers:
            patch.setattr(SupervisedWorker, "has_answered", lambda self, job: seen(self, job, next(turns)))
        return run_here(case), counts


@functools.cache
def without_limits(name: str) -> Run:
    """The run with so many slots and buffers that none is used twice in a step."""
    run, counts = watch({**CASES, **COMMIT_EARLY}[name], more=200)
    assert counts["_commit_early"] == 0
    return run


@pytest.mark.parametrize("name", CASES)
def test_as_many_as_the_schedule_says_are_enough(name: str) -> None:
    """The worker is never seen to be done before it is waited for, as beside a device that runs behind the host. That as many are needed:
    tests/unit/core/test_schedule.
    """
    run, counts = watch(CASES[name], False)
    assert counts["_commit_early"] == 0
    assert_same_run(run, without_limits(name))


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "early"])
@pytest.mark.parametrize("name", COMMIT_EARLY)
def test_the_same_bits_where_windows_commit_early(name: str, answers: bool) -> None:
    run, counts = watch(COMMIT_EARLY[name], answers)
    assert counts["_commit_early"] > 0
    # With clipping, what is shown has predicted factors; the gradients of this model do not depend on it.
    (assert_same_state if COMMIT_EARLY[name].max_norm else assert_same_run)(run, without_limits(name))


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
