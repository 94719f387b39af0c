"""Clipping and skipped steps in training."""

import math
from dataclasses import replace

import pytest
import torch

from harness import Case, run_here
from models import OptimizerOptions
from reference import adamw_reference
from same_bits import assert_close_to_adamw, assert_same_tensors

BASE = Case(steps=10, topk_ratio=0.05, update_interval=4, publish_lag=1)


@pytest.mark.parametrize("topk_ratio", [0, 0.05, 1])
def test_clipping_acts_on_every_weight(topk_ratio: float) -> None:
    """With a tiny norm every gradient is far below eps, so every weight must move far less than without clipping."""
    optimizer = OptimizerOptions(scheduler=False)
    case = replace(BASE, topk_ratio=topk_ratio, optimizer=optimizer, model_options={"shapes": ((13, 7), (11,))})
    weights = case.fixed_gradients()[0]
    clipped, free = (run_here(replace(case, max_norm=norm)) for norm in (1e-12, None))
    for start, w, v, h in zip(weights, clipped.weights, free.weights, optimizer.groups(0), strict=True):
        decayed = start * (1 - h.lr * h.weight_decay) ** case.steps
        assert (w - decayed).abs().max() < 1e-2 * h.lr
        assert (v - decayed).abs().median() > h.lr


def test_accumulation_and_clipping_equal_plain_torch() -> None:
    """Accumulation 4 with clipping: the stock strategy divides the loss by 4 twice, so that clipping hardly acts."""
    case = replace(BASE, model="SmallNet", optimizer=OptimizerOptions(lr=1e-2), accumulate=4, max_norm=0.1)
    case = replace(case, update_interval=1, publish_lag=0).with_keys(optimizer_in_backward=False)
    model = case.make_model()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    norms = []
    for step in range(case.steps):
        optimizer.zero_grad()
        for micro in range(4):
            (model.loss(step, micro, 0) / 4).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        scheduler.step()
    assert min(norms) > 0.11  # clipping matters in every step
    run = run_here(case)
    for ours, theirs in zip(run.weights, (p for group in model.parameter_groups() for p in group), strict=True):
        # float32 rounding, see test_training.
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("topk_ratio", [0, 0.05, 1])
def test_a_gradient_that_is_not_finite_skips_its_step(value: float, topk_ratio: float) -> None:
    bad_steps = [3, 4, 8]  # counted from 0: one in mid-window, two in a row, and one whose window is open at the end
    case = replace(
        BASE,
        topk_ratio=topk_ratio,
        max_norm=1.0,
        model_options={"not_finite": {(step, 0): value for step in bad_steps}},
    )
    weights, gradients, groups = case.fixed_gradients()
    run = run_here(case)
    assert run.skipped == len(bad_steps)
    assert run.counts == [case.steps - len(bad_steps)] * 2
    exact = adamw_reference(weights, gradients, groups, max_norm=1.0)
    assert exact.skipped == len(bad_steps)
    assert_close_to_adamw(run, exact)
    assert_same_tensors(run.weights, run.master)
    # The weights that the model shows are always finite.
    assert all(torch.isfinite(w).all() for shown in run.shown for w in shown)


@pytest.mark.parametrize("bad_steps", [(0,), (0, 1), (2,)])
def test_a_skipped_step_does_not_select(bad_steps: tuple[int, ...]) -> None:
    """The step that decides the selection is not finite: the next one that is decides instead."""
    case = replace(
        BASE,
        topk_ratio=0.3,
        warm_up=3 if bad_steps == (2,) else 0,
        model_options={"not_finite": {(step, 0): math.nan for step in bad_steps}},
    )
    run = run_here(case)
    oracle = case.make_reference()
    for step in range(case.steps):
        for ours, theirs in zip(run.shown[step], oracle.parameters, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=2e-6)
        oracle.step()
    assert oracle.owned is not None


def test_a_run_in_which_every_step_is_skipped() -> None:
    case = replace(BASE, steps=6, model_options={"not_finite": {(step, 0): math.inf for step in range(6)}})
    run = run_here(case)
    assert run.skipped == 6
    assert run.counts == [0, 0]
    for ours, start in zip(run.weights, case.fixed_gradients()[0], strict=True):
        assert torch.equal(ours, start)
    assert not any(m.any() for m in [*run.exp_avg, *run.exp_avg_sq])
