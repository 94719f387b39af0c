"""Gradients of small vectors, which are handled together: the same training as with each handled alone."""

import math
from dataclasses import replace

import pytest
import torch

from harness import Case, Run, run_here
from same_bits import assert_same_run

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

VECTOR = 3
"""Number of a vector in `models.SHAPES`."""
CASE = Case(steps=10, topk_ratio=0.3)
IN_BACKWARD = replace(CASE, update_interval=1, publish_lag=0, strategy_options={"reduce_bucket_size": 200})
FROZEN = {"frozen_in": {VECTOR: (2, 6)}}
CASES = {
    "S=4": CASE,
    "two parameter groups": replace(CASE, model="SmallNet"),
    "nothing on the device": replace(CASE, topk_ratio=0.0),
    "bf16": replace(CASE, precision="bf16-true"),
    "accumulation": replace(CASE, accumulate=3),
    "flush in between": replace(CASE, flush_after=(5, 6)),
    "frozen for a while": replace(CASE, model="FreezingModule", model_options=FROZEN),
    "in backward": IN_BACKWARD,
    "in backward, frozen for a while": replace(IN_BACKWARD, model="FreezingModule", model_options=FROZEN),
    # With so many blocks some end within a vector.
    "S=16": replace(CASE, update_interval=16, steps=20),
}


def one_by_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("lightning_zenflow.step.gradient_router._LARGEST_NUMEL", 0)
    return run_here(case)


@pytest.mark.parametrize("name", CASES)
def test_together_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_run(run_here(CASES[name]), one_by_one(CASES[name], monkeypatch))


def test_some_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zenflow.step.gradient_router._LARGEST_NUMEL", 36)  # of vectors of 37 and 1
    ours = run_here(CASE)
    assert_same_run(ours, one_by_one(CASE, monkeypatch))


@pytest.mark.parametrize("case", [CASE, replace(CASE, model="FreezingModule", model_options=FROZEN)])
def test_they_are_part_of_the_norm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frozen one had before is not. (Sums in another order may differ in the last bit.)"""
    clipped = replace(case, max_norm=0.5)
    ours, theirs = run_here(clipped), one_by_one(clipped, monkeypatch)
    for a, b in zip(ours.master, theirs.master, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", [replace(CASE, max_norm=1.0), IN_BACKWARD], ids=["S=4", "in backward"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_that_is_not_finite(case: Case, value: float) -> None:
    """The step is skipped, or what of it comes after; nothing is left of it in the next steps, when the vector is frozen."""
    hostile = {"not_finite": {(1, 0): value}, "not_finite_in": VECTOR}
    run = run_here(replace(case, model="FreezingModule", model_options={**FROZEN, **hostile}))
    assert run.skipped == 1
    assert all(torch.isfinite(w).all() for of_step in [*run.shown, run.weights] for w in of_step)
