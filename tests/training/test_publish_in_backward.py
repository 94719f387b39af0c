"""Publishing during backward: the same bits as at the end of the step, whenever the worker is done."""

import itertools
from dataclasses import replace

import pytest

from harness import APPROXIMATE, AUTO, EVERYTHING, Case, Run, run_here
from lightning_zenflow.worker.supervisor import SupervisedWorker
from models import SHAPES
from rank_states import seen
from same_bits import assert_same_run

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

CASE = Case(steps=14, topk_ratio=0.3, max_norm=1.0, loop="direct").with_keys(**APPROXIMATE)
CASES = {
    "S=4, d=1": CASE,
    "S=2, d=3, bf16": replace(CASE, update_interval=2, publish_lag=3, precision="bf16-true"),
    "many blocks, accumulation": replace(CASE, update_interval=16, accumulate=2, steps=20),
    "reselection": CASE.with_keys(**EVERYTHING),
    "flush in between": replace(CASE, flush_after=(5, 6)),
    "nothing late": replace(CASE, publish_lag=0),
    "tied weights, checkpointing": replace(
        CASE, model="TiedNet", model_options={"checkpoint": "non-reentrant", "head_in_checkpoint": True}
    ),
    # Whose backward passes read weights that jobs in flight will overwrite only steps later.
    "a network, long lag": replace(CASE, model="TiedNet", update_interval=2, publish_lag=3),
    "frozen layers": replace(CASE, model="FreezingModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}}),
    "changes of schedule": replace(CASE, schedules=((3, 8, 1), (7, 1, 0), (9, 2, 2))).with_keys(**AUTO),
}


def run_with(case: Case, answers: tuple[bool, ...]) -> Run:
    """A run in which the worker is seen to be done in time, or not, as `answers` say in turn."""
    turns = itertools.cycle(answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisedWorker, "has_answered", lambda self, submission: seen(self, submission, next(turns)))
        return run_here(case)


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_whenever_the_worker_is_done(name: str) -> None:
    never, sometimes, always = (run_with(CASES[name], answers) for answers in ((False,), (False, False, True), (True,)))
    early = [sum(in_backward for in_backward, _ in run.h2d_bytes) for run in (never, sometimes, always)]
    # Where slots are few (d = 0, submitted in backward), answers are waited for during backward.
    assert early[0] == 0 or name in ("nothing late", "changes of schedule")
    assert early[0] <= early[1] and early[0] < early[2]
    for run in (sometimes, always):
        assert_same_run(run, never)


def test_nothing_is_left_for_the_end_of_the_step() -> None:
    """But for the jobs of the first step, which selects and is synchronous."""
    # Without the last parameter, which has no gradient in every second step.
    case = replace(CASE, model_options={"shapes": SHAPES[:6]})
    for in_backward, rest in run_with(case, (True,)).h2d_bytes[2:]:
        assert in_backward > 0 and rest == 0
