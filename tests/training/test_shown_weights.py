"""Shown weights are near AdamW's where weight prediction and provisional updates are "auto"."""

import functools
from dataclasses import replace

import pytest
import torch

from harness import Case, run_here
from reference import AdamWState

FIXED = Case(steps=24, topk_ratio=0)
"""Its gradients do not depend on the weights, so that AdamW's weights are known for every step."""


@functools.cache
def distances(s: int, d: int, weight_prediction: float | str, provisional_scale: float | str) -> float:
    """Of shown weights from AdamW's, root of the mean square over matrices and late steps."""
    options = {"weight_prediction": weight_prediction, "provisional_scale": provisional_scale}
    case = replace(FIXED, update_interval=s, publish_lag=d, strategy_options=options)
    run = run_here(case)
    weights, gradients, groups = case.fixed_gradients()
    state = AdamWState.start(weights, torch.float64)
    squares = []
    for step in range(case.steps):
        if step > 12:
            squares += [
                (shown.double() - w).square().flatten()
                for shown, w in zip(run.shown[step], state.weights, strict=True)
                if w.dim() > 1
            ]
        state.step(gradients[step], groups[step], max_norm=0.0)
    return float(torch.cat(squares).mean().sqrt())


@pytest.mark.parametrize(("s", "d"), [(1, 1), (4, 1)])
def test_shown_weights_are_near_adamws(s: int, d: int) -> None:
    auto = distances(s, d, "auto", "auto")
    assert auto < 0.75 * distances(s, d, 0, 0)
    assert auto < 0.75 * distances(s, d, s + d - 1, 0.5)
    assert auto < distances(s, d, "auto", 0)
