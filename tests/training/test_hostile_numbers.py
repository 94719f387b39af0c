"""Gradients that are not finite, zero, denormal or near the end of their type's range: what is applied, what is skipped, what is shown."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import APPROXIMATE, Case, Run, StockStrategy, run_here
from lightning_zenflow.core.step_inputs import step_scale
from reference import AdamWState, adamw_reference

HOSTILE_STEP = 3
"""Counted from 0: in mid-window, after the selection."""

APPLIED = (0.0, 1e-40, 1e-25, 1e10, 1e17)
SKIPPED = (math.nan, math.inf, -math.inf, 3e18, 1e20, 1e25, 1e38)
"""Factors on the loss of one step, and with it on its gradients, whose norm is 30 before: above 1.8e19 its square is not in float32."""

BASE = Case(model="HostileModule", steps=9, topk_ratio=0.3, strategy_options=APPROXIMATE)


def hostile(factor: float, **options: Any) -> Case:
    return replace(
        BASE, **{**options, "model_options": {"factors": {HOSTILE_STEP: factor}, **options.get("model_options", {})}}
    )


def exact(case: Case) -> AdamWState:
    """AdamW in float64 without the steps that are to be skipped."""
    weights, gradients, groups = case.fixed_gradients()
    for of_step in gradients:
        square = sum(float(g.double().square().sum()) for g in of_step)
        if not square <= torch.finfo(torch.float32).max:
            of_step[0] = torch.full_like(of_step[0], math.nan)
    return adamw_reference(weights, gradients, groups, max_norm=case.max_norm or 0.0)


def assert_is_adamw(run: Run, state: AdamWState) -> None:
    assert run.skipped == state.skipped
    assert run.counts == [state.count] * 2
    for i, weight in enumerate(state.weights):
        # float32 against float64, see test_equivalence; moments relative to their size, which a factor of 1e17 makes large.
        torch.testing.assert_close(run.master[i].double(), weight, rtol=1e-6, atol=1e-6)
        for ours, theirs in ((run.exp_avg[i], state.exp_avg[i]), (run.exp_avg_sq[i], state.exp_avg_sq[i])):
            largest = float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6 * max(1.0, largest))
    shown: list[Tensor] = [w for of_step in [*run.shown, run.weights] for w in of_step]
    assert all(torch.isfinite(w).all() for w in shown)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("factor", [*APPLIED, *SKIPPED])
def test_one_hostile_step(factor: float, precision: str, max_norm: float | None) -> None:
    """With weight prediction and provisional updates: what the model shows stays finite, and what the flush leaves is AdamW."""
    case = hostile(factor, precision=precision, max_norm=max_norm)
    run, state = run_here(case), exact(case)
    assert state.skipped == (factor in SKIPPED)
    assert_is_adamw(run, state)


@pytest.mark.parametrize("factor", [math.nan, 3e18])
def test_a_hostile_step_with_everything_switched_on(factor: float) -> None:
    """Selections, windows of gradients accumulated on the way, several micro-batches, states that visit the device."""
    options = {**APPROXIMATE, "select_interval": 1}
    case = hostile(factor, accumulate=2, max_norm=1.0, publish_lag=3, strategy_options=options)
    assert_is_adamw(run_here(case), exact(case))


@functools.cache
def without_unused(strategy: str, factor: float, max_norm: float | None) -> Run:
    """All parameters have gradients in all steps: where there is none, DeepSpeed's offload applies the one before again."""
    shapes = ((31, 29), (53, 7), (37,), (3, 211), (1,))
    case = hostile(factor, max_norm=max_norm, model_options={"shapes": shapes}, update_interval=1, publish_lag=0)
    return run_here(case, strategy=StockStrategy() if strategy == "stock" else None)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("factor", [0.0, 1e-40, 1e10, 1e17, math.nan, math.inf, 3e18, 1e25])
def test_deepspeeds_offload_does_the_same(factor: float, max_norm: float | None) -> None:
    ours, theirs = without_unused("zenflow", factor, max_norm), without_unused("stock", factor, max_norm)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_a_loss_that_is_never_finite() -> None:
    case = replace(BASE, model_options={"factors": dict.fromkeys(range(BASE.steps), math.nan)})
    run = run_here(case)
    assert (run.skipped, run.counts) == (BASE.steps, [0, 0])
    for ours, start in zip(run.weights, case.fixed_gradients()[0], strict=True):
        assert torch.equal(ours, start)


def test_gradients_that_are_always_zero() -> None:
    """Nothing is selected by chance that would not be finite; decay goes on."""
    case = replace(BASE, model_options={"factors": dict.fromkeys(range(BASE.steps), 0.0)})
    assert_is_adamw(run_here(case), exact(case))


@pytest.mark.parametrize("value", [3e38, 1e30, -2e19])
def test_one_huge_element(value: float) -> None:
    """Near the end of bf16's range, in one parameter only."""
    case = replace(
        BASE,
        precision="bf16-true",
        max_norm=1.0,
        model_options={"factors": {}, "not_finite": {(HOSTILE_STEP, 0): value}},
    )
    run, state = run_here(case), exact(case)
    assert state.skipped == 1
    assert_is_adamw(run, state)


@pytest.mark.parametrize(
    ("norm", "applied"), [(1.8e19, True), (1.9e19, False), (1e30, False), (1e-30, True), (0.0, True)]
)
def test_where_a_norm_counts_as_overflow(norm: float, applied: bool) -> None:
    scale = step_scale(
        torch.tensor(norm, dtype=torch.float64).square(), max_norm=1.0, loss_scale=1.0, count=torch.zeros(())
    )
    assert bool(scale.finite) == applied
    assert math.isnan(float(scale.factor)) != applied
    assert float(scale.norm) == pytest.approx(norm)


@pytest.mark.parametrize(
    "shapes",
    [
        ((0,), (0, 5), (3, 0), (1, 1), (1,), (2, 3)),
        ((1, 1), (1,)),
        ((2, 1), (1, 2), (2,)),
        ((101, 3), (7, 103), (13,), (97,)),
    ],
)
@pytest.mark.parametrize("schedule", [(1, 0), (4, 1), (16, 2)])
def test_odd_sizes(shapes: tuple[tuple[int, ...], ...], schedule: tuple[int, int]) -> None:
    """No elements, one element, one row, one column, primes; fewer elements than blocks."""
    case = hostile(
        math.nan, model_options={"shapes": shapes}, update_interval=schedule[0], publish_lag=schedule[1], steps=7
    )
    assert_is_adamw(run_here(case), case.adamw())
