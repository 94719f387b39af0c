"""`OffloadAdamW(clip_prediction=True)`: what the user's code clips to is learned, and clipped steps are updated in backward as well."""

import copy
from typing import Any

import pytest
import torch

from lightning_zenflow.offload.run_state import CHECKPOINT_KEY
from plain_loops import Loop, make_loop, make_model, reading_of

BOUND = 1e-2
"""Largest relative difference of a loss: docs/how_it_works.md has up to 6e-3 for most models."""


def make_loops() -> tuple[Loop, Loop]:
    return make_loop("ours", clip_prediction=True), make_loop("torch")


def learned(loop: Loop) -> tuple[float, float]:
    """The limit, and the loss scale."""
    state = loop.optimizer.state_dict()[CHECKPOINT_KEY]["in_backward"]
    return float(state["limit"]), float(state["scale"])


def assert_near(ours: Loop, theirs: Loop, rtol: float) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=10 * rtol, atol=0)


@pytest.mark.parametrize(
    ("options", "rtol", "limit"),
    [
        ({"max_norm": lambda _: 0.5}, BOUND, 0.5),
        ({"max_norm": lambda _: 0.5, "micro_batches": lambda _: 2}, BOUND, 0.5),
        ({"max_norm": lambda step: 0.5 if step < 4 else 0.25}, BOUND, 0.25),
        ({"max_norm": lambda step: 0.5 if step < 4 else 50.0}, BOUND, torch.inf),
        ({"max_norm": lambda _: 50.0}, 3e-6, torch.inf),
        ({}, 3e-6, torch.inf),
    ],
    ids=["always", "micro-batches", "another limit", "none any more", "unclipped", "plain"],
)
def test_losses(options: dict[str, Any], rtol: float, limit: float) -> None:
    ours, theirs = make_loops()
    assert_near(ours.train(**options), theirs.train(**options), rtol)
    reading = reading_of(ours.optimizer)
    # All blocks of all steps but the first.
    assert (reading.steps_in_backward, reading.in_backward_jobs) == (7, 56)
    assert (
        reading.factor_error is not None and (reading.factor_error < 0.1) and (rtol > 3e-6 or not reading.factor_error)
    )
    assert learned(ours) == (pytest.approx(limit, rel=1e-6), 1.0)


def test_steps_without_clipping() -> None:
    """Now and then the loop does not clip, which a step above the limit shows."""
    ours, theirs = (loop.train(12, max_norm=lambda step: None if step in (5, 6, 10) else 0.5) for loop in make_loops())
    assert_near(ours, theirs, 5e-2)
    assert reading_of(ours.optimizer).in_backward_jobs == 88
    assert learned(ours)[0] == pytest.approx(0.5, rel=1e-6)


def test_loss_scaler() -> None:
    """The scale grows every three steps, and falls behind a step that is left out; the limit is that of unscaled gradients."""
    ours, theirs = make_loops()
    for loop in (ours, theirs):
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(9):
            loop.backward(step, factor=float("inf") if step == 5 else 1.0)
            used = loop.scaler.get_scale()
            loop.end_step(0.5)
        assert used == 1024.0 and not loop.norms.pop(5).isfinite()
    assert_near(ours, theirs, 5e-2)
    assert reading_of(ours.optimizer).steps_in_backward == 7
    assert learned(ours) == (pytest.approx(0.5, rel=1e-5), used)


def test_continued_with_equal_bits() -> None:
    """What has been learned is in the state, and so are weights with the true factor: the model's were saved before."""
    loop, _ = make_loops()
    loop.train(4, max_norm=lambda _: 0.5)
    shown = loop.weights()
    model = make_model()
    model.load_state_dict(loop.model.state_dict())
    state = copy.deepcopy(loop.optimizer.state_dict())
    again = make_loop("ours", model=model, clip_prediction=True, accumulation_steps=1)
    again.optimizer.load_state_dict(state)
    again.steps = loop.steps
    assert all(map(torch.equal, again.weights(), loop.weights()))
    assert not all(map(torch.equal, shown, loop.weights()))
    for other in (loop, again):
        # One schedule for both.
        other.scheduler = torch.optim.lr_scheduler.ConstantLR(other.optimizer, factor=1.0)
        other.losses.clear()
        other.train(4, max_norm=lambda _: 0.5)
    assert again.losses == loop.losses
