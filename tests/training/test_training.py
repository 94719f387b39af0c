"""Training step by step: losses and shown weights are the oracle's, whatever is late."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import Case, Run, run_here
from lightning_zenflow.core.schedule import blocks_wanted
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.offload.rank_state import Block
from models import OptimizerOptions

BASE = Case(model="SmallNet", optimizer=OptimizerOptions(lr=3e-3), steps=14, topk_ratio=0.3, loop="direct")
CASES = {
    "defaults": replace(BASE, topk_ratio=0.05),
    "everything on the device": replace(BASE, topk_ratio=1, publish_lag=3),
    "long windows": replace(BASE, topk_ratio=0.5, update_interval=7, publish_lag=3),
    "in backward": replace(BASE, update_interval=2, publish_lag=0),
    "one step late": replace(BASE, update_interval=1, max_norm=0.5),
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
for name, precision in (
    ("defaults", "bf16-true"),
    ("flushes", "bf16-mixed"),
    ("accumulated, clipped", "bf16-true"),
    ("in backward", "bf16-true"),
):
    CASES[f"{name}, {precision}"] = replace(CASES[name], precision=precision)


FREEZING = replace(BASE, model="LinearLossModule", model_options={"frozen_in": {0: (4, 8), 3: (6, 12), 4: (6, 20)}})
CASES |= {
    "freezing": FREEZING,
    "freezing, warm-up, long lag": replace(FREEZING, update_interval=2, publish_lag=3, warm_up=6, flush_after=(5,)),
}
NOT_FINITE = {"not_finite": {(3, 0): math.inf, (6, 0): math.nan}, "not_finite_in": 2}
CLIPPED = {
    "clipped": replace(BASE, update_interval=2, publish_lag=0, max_norm=0.5),
    "clipped, nothing late": replace(BASE, update_interval=1, publish_lag=0, max_norm=0.5, accumulate=2),
    "clipped, nothing on the device": replace(BASE, topk_ratio=0, update_interval=4, publish_lag=0, max_norm=0.5),
    "clipped, bf16-true": replace(BASE, update_interval=2, publish_lag=0, max_norm=0.5, precision="bf16-true"),
    "not finite": replace(FREEZING, update_interval=2, publish_lag=0, max_norm=0.5, model_options=NOT_FINITE),
    "not finite, not clipped": replace(FREEZING, update_interval=1, publish_lag=0, model_options=NOT_FINITE),
}
"""Blocks are submitted in backward, with factors that differ from the true ones."""


def compare_with_oracle(
    case: Case, runs: Sequence[Run], predicted: Sequence[Mapping[int, float]] | None = None
) -> None:
    """Of each step the weights that were shown, and the losses. `runs` has one entry a rank.

    `predicted` has for each step the factors of the blocks that were submitted in backward, of one rank; None: they are the true ones.

    float32, freely: the oracle never sees the engine's weights. bf16: each step starts from the weights that the engine showed, since a
    difference in the last place of a float32 weight tips the rounding to bf16 now and then; freely running, the two would drift apart.
    """
    oracle = case.make_oracle(world_size=len(runs))
    if case.publish_lag == 0 and case.strategy_options.get("overlap_step", True):
        n_blocks = blocks_wanted([case.update_interval], in_backward=True, numel=0)
        oracle.zenflow.blocks = oracle.places(n_blocks)[0]
    follows, different = case.dtype != torch.float32, 0
    for step in range(case.steps):
        if follows:
            oracle.follow(runs[0].shown[step])
        factors = None
        if predicted is not None:
            of_blocks = torch.full((1 + max(int(b.max()) for b in oracle.zenflow.blocks),), runs[0].factors[step])
            for block, factor in predicted[step].items():
                of_blocks[block] = factor
            factors = [of_blocks[of_elements] for of_elements in oracle.zenflow.blocks]
        losses = oracle.step(factors)
        for micro, of_ranks in enumerate(losses):
            for run, loss in zip(runs, of_ranks, strict=True):
                assert run.losses[step][micro] == pytest.approx(
                    loss, rel=5e-7, abs=1e-6 if follows else 5e-6, nan_ok=True
                )
        if step + 1 in case.flush_after or step + 1 == case.steps:
            oracle.flush()
        for run in runs:
            shown = run.shown[step + 1] if step + 1 < case.steps else run.weights
            # float32: torch's AdamW groups its operations in another way than the kernel, which is about one unit in the last place of a
            # weight and step (weights are below 1.5, their unit is at most 1.2e-7), fed back through the gradients for up to twenty steps.
            # A weight shown one step too early or too late would differ by a learning rate, 3e-3. bf16 has 8 significant bits.
            rtol, atol = (2**-7, 1e-6) if follows else (0.0, 5e-6)
            for ours, theirs in zip(shown, oracle.parameters, strict=True):
                torch.testing.assert_close(ours.float(), theirs.detach().float(), rtol=rtol, atol=atol)
                different += follows and int((ours != theirs).sum())
    total = len(runs) * case.steps * sum(p.numel() for p in oracle.parameters)
    assert different < 2e-3 * total, f"{different} of {total} rounded differently"


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
