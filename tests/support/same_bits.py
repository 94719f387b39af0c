"""Runs that must not differ in a single bit, and what of them is compared."""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness import Run


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
