"""Publishing during backward: the same bits as at the end of the step, whenever the worker is done."""

import functools
from collections.abc import Set
from dataclasses import replace
from typing import Any

import pytest

from harness import APPROXIMATE, AUTO, EVERYTHING, Case, Run, run_here
from lightning_zenflow.core.device import Event
from lightning_zenflow.deferred.memory import EXPOSED_COPIES, Publisher
from lightning_zenflow.worker.supervisor import Submission, SupervisedWorker
from rank_states import seen
from same_bits import assert_same_run

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

CASE = Case(steps=14, topk_ratio=0.3, max_norm=1.0, update_interval=4, publish_lag=1, strategy_options=APPROXIMATE)
CASES = {
    "S=4, d=1": CASE,
    "S=2, d=3, bf16": replace(CASE, update_interval=2, publish_lag=3, precision="bf16-true"),
    "many blocks, accumulation": replace(CASE, update_interval=16, accumulate=2, steps=20),
    "reselection": replace(CASE, strategy_options=EVERYTHING),
    "flush in between": replace(CASE, flush_after=(5, 6)),
    "nothing late": replace(CASE, publish_lag=0),
    "tied weights, checkpointing": replace(
        CASE, model="TiedNet", model_options={"checkpoint": "non-reentrant", "head_in_checkpoint": True}
    ),
    # Whose backward passes read weights that jobs in flight will overwrite only steps later.
    "a network, long lag": replace(CASE, model="TiedNet", update_interval=2, publish_lag=3).with_keys(
        reduce_bucket_size=200
    ),
    "frozen layers": replace(CASE, model="FreezingModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}),
    "changes of schedule": replace(
        CASE,
        schedules=((3, 8, 1), (7, 1, 0), (9, 2, 2)),
        strategy_options={**APPROXIMATE, **AUTO},
    ),
}


@functools.cache
def run_with(name: str, answers: str) -> tuple[Run, int, int]:
    """A run in which the worker is never, always or now and then seen to be done in time; and how many copies were early and late."""
    early = late = asked = 0
    copy_behind, finish = Publisher.copy_behind, Publisher.finish

    def has_answered(self: SupervisedWorker, submission: Submission) -> bool:
        nonlocal asked
        asked += 1
        return seen(self, submission, answers == "always" or (answers == "sometimes" and asked % 3 == 0))

    def counted_copy(self: Publisher, event: Event, block: int, buffer: int, slices: Set[int], name: str) -> None:
        nonlocal early
        early += name != EXPOSED_COPIES
        copy_behind(self, event, block, buffer, slices, name)

    def counted_finish(self: Publisher, block: int, buffer: int, rest: Set[int], **kwargs: Any) -> None:
        nonlocal late
        late += bool(rest)
        finish(self, block, buffer, rest, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisedWorker, "has_answered", has_answered)
        patch.setattr(Publisher, "copy_behind", counted_copy)
        patch.setattr(Publisher, "finish", counted_finish)
        return run_here(CASES[name]), early, late


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("answers", ["always", "sometimes"])
def test_the_same_bits_whenever_the_worker_is_done(name: str, answers: str) -> None:
    ours, early, _ = run_with(name, answers)
    theirs, never, _ = run_with(name, "never")
    # Where slots are few (d = 0, submitted in backward), answers are waited for during backward.
    assert never == 0 or name in ("nothing late", "changes of schedule")
    assert early > never
    assert_same_run(ours, theirs)


def test_nothing_is_left_for_the_end_of_the_step() -> None:
    """But for the jobs of the first step, which selects and is synchronous, and of the flush, one of which is in flight before it."""
    _, early, late = run_with("S=4, d=1", "always")
    assert early > late
    assert late == 2 * CASE.update_interval + CASE.publish_lag
