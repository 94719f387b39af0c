"""Jobs that are submitted in backward: AdamW's own bits, and what differs where a gradient is clipped or not finite."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from direct_step import direct_step
from harness import APPROXIMATE, AUTO, RESELECTING, Case, run_here
from lightning_zenflow.offload.reference import AdamWState
from same_bits import assert_is_adamw, assert_same_run

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

CASE = Case(model="TiedNet", steps=10, topk_ratio=0.3, update_interval=1, publish_lag=0, loop="direct")
FREEZING = replace(CASE, model="LinearLossModule", model_options={"frozen_in": {0: (4, 8), 3: (2, 100)}})
NOTHING_LATE = {
    "TiedNet": CASE,
    "no gradient": replace(CASE, model="LinearLossModule"),
    "checkpointing": replace(CASE, model_options={"checkpoint": "non-reentrant", "head_in_checkpoint": True}),
    "never finite": replace(CASE, model="LinearLossModule", model_options={"factors": {4: math.nan, 6: math.inf}}),
}
LATE = {
    "S=2, frozen and unfrozen": replace(FREEZING, update_interval=2),
    "S=4, everything": replace(CASE, update_interval=4, flush_after=(5, 6)).with_keys(**APPROXIMATE, **RESELECTING),
    "changes of schedule": replace(
        CASE,
        steps=20,
        schedules=((3, 2, 1), (8, 1, 0), (11, 4, 1), (12, 1, 1), (14, 1, 0), (15, 2, 0), (17, 4, 2)),
    ).with_keys(**APPROXIMATE, **AUTO),
}
CLIPPED_CASE = replace(CASE, model="LinearLossModule", max_norm=0.5)
INFINITE = {"not_finite": {(4, 0): math.inf}}
CLIPPED = {
    "clipped": CLIPPED_CASE,
    "not finite": replace(CLIPPED_CASE, model_options={"not_finite": {(4, 0): math.nan, (6, 1): math.inf}}),
    "not finite, not clipped": replace(CLIPPED_CASE, max_norm=None, model_options=INFINITE),
    "clipped, changes of schedule": replace(LATE["changes of schedule"], model="LinearLossModule", max_norm=0.5),
}
CASES = {**NOTHING_LATE, **LATE, **CLIPPED}


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_adamws(name: str) -> None:
    """Without clipping and with S = 1, the weights of every forward pass as well."""
    run = run_here(CASES[name])
    assert run.in_backward_jobs > 0
    assert_is_adamw(CASES[name], run, shown=name in NOTHING_LATE)


@pytest.mark.parametrize("name", ["S=4, everything", "clipped, changes of schedule"])
def test_lightning_gives_the_same_bits(name: str) -> None:
    """With buckets so small that gradients arrive one after the other."""
    lightning = replace(CASES[name], loop="trainer").with_keys(reduce_bucket_size=200)
    assert_same_run(run_here(lightning), run_here(CASES[name]))


@pytest.mark.parametrize(
    ("case", "n_blocks"),
    [(CASE, 16), (replace(CASE, publish_lag=1), 0), (CASE.with_keys(overlap_step=False), 0)],
    ids=["d=0", "d=1", "synchronous"],
)
def test_all_blocks_are_submitted_in_backward_or_none(case: Case, n_blocks: int) -> None:
    """Also of the first step, because nothing is selected and nothing is clipped."""
    assert run_here(case).in_backward_jobs == n_blocks * case.steps


def test_nothing_is_shown_from_the_first_gradient_on_that_is_not_finite() -> None:
    """Blocks that were submitted before it show the step, later ones do not."""
    shown = run_here(CASES["not finite, not clipped"]).shown
    moved = [not torch.equal(a, b) for a, b in zip(shown[4], shown[5], strict=True)]
    assert any(moved) and not moved[0]


def test_shown_weights_differ_by_a_bounded_part_of_one_update() -> None:
    """With a fixed sequence of gradients: at most (1 - beta1) times the learning rate times the factor's relative error, and only once."""
    case = replace(CLIPPED_CASE, topk_ratio=0.0, steps=20)
    weights, gradients, groups = case.fixed_gradients()
    exact, largest = AdamWState.start(weights, torch.float64), 0.0
    for step, shown in enumerate(run_here(case).shown):
        largest = max([largest, *(float((a - b).abs().max()) for a, b in zip(shown, exact.weights, strict=True))])
        exact.step(gradients[step], groups[step], max_norm=0.5)
    assert 1e-5 < largest < 2 * case.optimizer.groups(0)[0].lr


@pytest.mark.parametrize("keys", [{"publish_lag": 0}, {"publish_lag": 0, "overlap_step": False}, {"publish_lag": 1}])
def test_a_learning_rate_that_changes_after_backward_is_used(keys: dict[str, Any]) -> None:
    """Of the exact state; weights that are submitted in backward are shown with the one before."""
    states, weights = [], [torch.ones(shape) for shape in ((12, 8), (5,), (6, 7))]
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(5)]
    options = {"update_interval": 1, "weight_prediction": 0, "provisional_scale": 0, **keys}
    for after in (False, True):
        with direct_step([weights], **options) as direct:
            for number, of_step in enumerate(gradients):
                if after:
                    direct.backward(of_step)
                direct.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)
                if not after:
                    direct.backward(of_step)
                direct.step.step()
            direct.step.flush()
            states.append(direct.state())
    assert all(map(torch.equal, *states))
