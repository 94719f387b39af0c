"""Comparisons of runs: bit for bit with each other, to float32's rounding with AdamW in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness import Run
from reference import AdamWState


def assert_same_tensors(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str = "") -> None:
    """Lists with one tensor a parameter have the same bits."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what} of parameter {i} differs by up to {(a - b).abs().max():.3g}"


def assert_same_state(ours: Run, theirs: Run) -> None:
    """Master weights, moments and counts are the same at the end, whatever the model showed meanwhile."""
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(ours, kind), getattr(theirs, kind), kind)
    assert ours.counts == theirs.counts
    assert ours.skipped == theirs.skipped


def assert_same_run(ours: Run, theirs: Run) -> None:
    """Besides the state at the end, weights and losses are the same in every step."""
    for step, (a, b) in enumerate(zip(ours.shown, theirs.shown, strict=True)):
        assert_same_tensors(a, b, f"the weight shown in step {step}")
    assert_same_tensors(ours.weights, theirs.weights, "the weight at the end")
    assert_same_state(ours, theirs)
    for a, b in zip(ours.losses, theirs.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_close_to_adamw(run: Run, state: AdamWState, *, atol: float = 1e-6) -> None:
    """The state at the end is AdamW's in float64.

    Weights are up to 4, hence rounded to 2.4e-7 at each of the steps; the moments' errors are relative to their largest term, of order 1.
    """
    for i, weight in enumerate(state.weights):
        torch.testing.assert_close(run.master[i].double(), weight, rtol=1e-6, atol=atol)
        torch.testing.assert_close(run.exp_avg[i].double(), state.exp_avg[i], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run.exp_avg_sq[i].double(), state.exp_avg_sq[i], rtol=1e-5, atol=1e-8)
