"""For one fixed sequence of gradients, the state after a flush is AdamW's, whatever was updated where and when."""

import functools
import itertools
from typing import Any

import pytest
import torch

from harness import Case, Run, run_here
from lightning_zenflow.step.context import StepPlan
from lightning_zenflow.step.plan import Planner
from models import OptimizerOptions
from reference import adamw_reference
from same_bits import assert_close_to_adamw, assert_same_state, assert_same_tensors

STEPS = 11
"""No multiple of any update interval but 1, so that windows are open at the end."""

SEQUENCES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, accumulated, clipped": {"accumulate": 3, "max_norm": 1.0},
    "bf16, clipped": {"precision": "bf16-true", "max_norm": 1.0},
    "bf16-mixed, accumulated, Adam": {
        "precision": "bf16-mixed",
        "accumulate": 3,
        "optimizer": OptimizerOptions(kind="Adam"),
    },
    "fp32, clipped, Adam, no scheduler": {"max_norm": 1.0, "optimizer": OptimizerOptions(kind="Adam", scheduler=False)},
}
"""Everything that the sequence of gradients and the optimizer depend on."""


def case_of(sequence: str, topk_ratio: float, update_interval: int, publish_lag: int, **options: Any) -> Case:
    return Case(
        steps=STEPS,
        topk_ratio=topk_ratio,
        update_interval=update_interval,
        publish_lag=publish_lag,
        **SEQUENCES[sequence],
        **options,
    )


@functools.cache
def baseline(sequence: str) -> Run:
    """Everything on the host, synchronously: one window a step."""
    return run_here(case_of(sequence, 0, 1, 0))


def check(case: Case, sequence: str) -> None:
    run = run_here(case)
    # The same kernel over the same gradients in the same order: not a bit may depend on where windows begin and end.
    assert_same_state(run, baseline(sequence))
    assert_same_tensors(run.weights, [w.to(case.dtype) for w in run.master])
    assert run.counts == [STEPS, STEPS]
    assert run.skipped == 0


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_baseline_is_adamw(sequence: str) -> None:
    assert_close_to_adamw(baseline(sequence), case_of(sequence, 0, 1, 0).adamw())


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_the_oracle_is_torchs_adamw(kind: str) -> None:
    """Two groups, a scheduler, accumulated gradients, clipping: against torch's optimizers in float64."""
    case = Case(steps=STEPS, accumulate=3, max_norm=1.0, optimizer=OptimizerOptions(kind=kind))
    weights, gradients, groups = case.fixed_gradients()
    ours = adamw_reference(weights, gradients, groups, max_norm=1.0)
    theirs = [torch.nn.Parameter(w.double()) for w in weights]
    optimizer = getattr(torch.optim, kind)([{"params": [p]} for p in theirs])
    for of_step, groups_of_step in zip(gradients, groups, strict=True):
        for p, gradient, entry, h in zip(theirs, of_step, optimizer.param_groups, groups_of_step, strict=True):
            p.grad = gradient.double()
            entry.update(lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
        # torch's clipping adds 1e-6 to the norm as well.
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
    for i, p in enumerate(theirs):
        torch.testing.assert_close(ours.weights[i], p.detach())
        torch.testing.assert_close(ours.exp_avg[i], optimizer.state[p]["exp_avg"])
        torch.testing.assert_close(ours.exp_avg_sq[i], optimizer.state[p]["exp_avg_sq"])


@pytest.mark.parametrize(
    ("sequence", "topk_ratio", "update_interval", "publish_lag"),
    [
        ("fp32", 0.05, 4, 1),
        ("fp32", 1, 7, 3),
        ("fp32", 0.5, 2, 1),
        ("fp32", 0, 4, 3),
        ("fp32", 0.05, 1, 1),
        ("fp32", 0.5, 7, 0),
        ("fp32, accumulated, clipped", 0.05, 4, 1),
        ("fp32, accumulated, clipped", 0.5, 1, 3),
        ("fp32, accumulated, clipped", 0, 2, 0),
        ("fp32, accumulated, clipped", 1, 4, 0),
        ("bf16, clipped", 0.05, 4, 1),
        ("bf16, clipped", 0, 7, 1),
        ("bf16, clipped", 1, 2, 3),
        ("bf16, clipped", 0.5, 1, 0),
        ("bf16-mixed, accumulated, Adam", 0.05, 7, 3),
        ("bf16-mixed, accumulated, Adam", 0.5, 4, 1),
        ("fp32, clipped, Adam, no scheduler", 0.05, 2, 0),
        ("fp32, clipped, Adam, no scheduler", 1, 1, 1),
    ],
)
def test_state_is_the_same_to_the_bit(sequence: str, topk_ratio: float, update_interval: int, publish_lag: int) -> None:
    check(case_of(sequence, topk_ratio, update_interval, publish_lag), sequence)


@pytest.mark.parametrize("topk_ratio", [0, 0.05])
@pytest.mark.parametrize("warm_up", [1, 3, 100])
def test_warm_up_changes_no_bit(topk_ratio: float, warm_up: int) -> None:
    check(case_of("fp32", topk_ratio, 4, 1, warm_up=warm_up), "fp32")


def test_the_warm_up_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of `requires_grad` starts over all but the steps that have been counted."""
    plan, synchronous = Planner.plan, []

    def noted(self: Planner, step: int) -> StepPlan:
        result = plan(self, step)
        synchronous.append(result.synchronous)
        return result

    monkeypatch.setattr(Planner, "plan", noted)
    frozen = {"frozen_in": {0: (1, 2), 1: (5, 100)}}
    run_here(Case(model="FreezingModule", model_options=frozen, topk_ratio=0, warm_up=3, steps=8))
    assert synchronous == [True] * 3 + [False] * 5


@pytest.mark.parametrize(("update_interval", "publish_lag"), [(4, 1), (2, 3), (1, 0)])
def test_flushes_change_no_bit(update_interval: int, publish_lag: int) -> None:
    check(case_of("bf16, clipped", 0.05, update_interval, publish_lag, flush_after=(1, 2, 5, 9)), "bf16, clipped")


def test_synchronous_mode() -> None:
    check(case_of("fp32", 0.05, 4, 3, strategy_options={"overlap_step": False}), "fp32")


def test_small_buckets() -> None:
    """Gradients that are reduced in many small buckets, and parameters that fill a bucket alone."""
    options = {"reduce_bucket_size": 400, "allgather_bucket_size": 200}
    check(case_of("fp32", 0.05, 4, 1, strategy_options=options), "fp32")


@pytest.mark.parametrize("shapes", [((1, 1), (1,)), ((3, 500), (2,)), ((700, 1), (1,)), ((2, 3), (1,))])
def test_odd_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    """One row, one column, fewer elements than blocks."""
    states = []
    for topk_ratio, update_interval, publish_lag in ((0, 1, 0), (0.05, 7, 1), (1, 16, 3)):
        case = Case(
            model_options={"shapes": shapes},
            steps=9,
            topk_ratio=topk_ratio,
            update_interval=update_interval,
            publish_lag=publish_lag,
        )
        run = run_here(case)
        assert_same_tensors(run.weights, run.master)
        states.append(run)
    for other in states[1:]:
        assert_same_state(other, states[0])


@pytest.mark.slow
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize(
    ("topk_ratio", "update_interval", "publish_lag"),
    list(itertools.product((0, 0.05, 0.5, 1), (1, 2, 4, 7), (0, 1, 3))),
)
def test_all_combinations(sequence: str, topk_ratio: float, update_interval: int, publish_lag: int) -> None:
    check(case_of(sequence, topk_ratio, update_interval, publish_lag), sequence)
