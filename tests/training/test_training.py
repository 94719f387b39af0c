"""Training step by step: losses and shown weights are the oracle's, whatever is late."""

import math
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from harness import Case, run_here
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.rank_state import Block
from models import OptimizerOptions
from same_bits import compare_with_oracle

BASE = Case(model="SmallNet", optimizer=OptimizerOptions(lr=3e-3), steps=14, topk_ratio=0.3, loop="direct")
CASES = {
    "defaults": replace(BASE, topk_ratio=0.05),
    "long windows": replace(BASE, topk_ratio=0.5, update_interval=7, publish_lag=3),
    "in backward": replace(BASE, update_interval=2, publish_lag=0),
    "flushes": replace(BASE, publish_lag=3, warm_up=2, flush_after=(3, 9, 10)),
    "accumulated, clipped": replace(BASE, topk_ratio=0.2, accumulate=3, max_norm=0.5),
    # Of the step that decides the selection; the next one that is finite does instead.
    **{
        f"steps {steps} are not finite": Case(
            steps=10,
            topk_ratio=0.3,
            warm_up=warm_up,
            model_options={"not_finite": {(step, 0): math.nan for step in steps}},
            loop="direct",
        )
        for steps, warm_up in (((0, 1), 0), ((2,), 3))
    },
}
for name, precision in (("defaults", "bf16-true"), ("flushes", "bf16-mixed")):
    CASES[f"{name}, {precision}"] = replace(CASES[name], precision=precision)
"""What lies between these, tests/fuzz draws."""
FREEZING = replace(BASE, model="LinearLossModule", model_options={"frozen_in": {0: (4, 8), 3: (6, 12), 4: (6, 20)}})
NOT_FINITE = {"not_finite": {(3, 0): math.inf, (6, 0): math.nan}, "not_finite_in": 2}
CLIPPED = {
    "clipped": replace(BASE, update_interval=2, publish_lag=0, max_norm=0.5),
    "clipped, nothing late": replace(BASE, update_interval=1, publish_lag=0, max_norm=0.5, accumulate=2),
    "not finite": replace(FREEZING, update_interval=2, publish_lag=0, max_norm=0.5, model_options=NOT_FINITE),
    "not finite, not clipped": replace(FREEZING, update_interval=1, publish_lag=0, model_options=NOT_FINITE),
}
"""Blocks are submitted in backward, with factors that differ from the true ones."""


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_oracles(name: str) -> None:
    compare_with_oracle(CASES[name], [run_here(CASES[name])])


@pytest.mark.parametrize("name", CLIPPED)
def test_every_step_has_the_predicted_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown weights of a block that is submitted in backward, and nothing else."""
    case, submit = CLIPPED[name], JobQueue.submit_in_backward
    predicted: list[dict[int, float]] = [{} for _ in range(case.steps)]

    def noted(self: JobQueue, block: Block, step: int, factor: Tensor, **options: Any) -> None:
        predicted[step - 1][block.number] = float(factor)
        submit(self, block, step, factor, **options)

    monkeypatch.setattr(JobQueue, "submit_in_backward", noted)
    run = run_here(case)
    wrong = [
        factor != true for of_step, true in zip(predicted, run.factors, strict=True) for factor in of_step.values()
    ]
    assert sum(wrong) >= 10
    compare_with_oracle(case, [run], predicted)
    with pytest.raises(AssertionError):
        compare_with_oracle(case, [run])


def test_the_oracle_tells_settings_apart() -> None:
    """A lag, window or selection that is off by one shows: the comparison above is not one that everything passes."""
    runs = [run_here(CASES["defaults"])]
    for wrong in ({"publish_lag": 2}, {"update_interval": 3}, {"topk_ratio": 0.2}, {"warm_up": 2}, {"topk_ratio": 0}):
        with pytest.raises(AssertionError):
            compare_with_oracle(replace(CASES["defaults"], **wrong), runs)


def test_each_gradient_is_let_go_when_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward: kept to its end, the gradients would take as much device memory as the model."""
    copy, held = ZenFlowZeroOptimizer.copy_grads_in_partition, []

    def watched(self: ZenFlowZeroOptimizer, param: Tensor, *args: object) -> None:
        copy(self, param, *args)  # type: ignore[arg-type]
        held.append(param.grad is not None)

    monkeypatch.setattr(ZenFlowZeroOptimizer, "copy_grads_in_partition", watched)
    run_here(replace(BASE, loop="trainer", steps=2, accumulate=2))
    assert held and not any(held)
