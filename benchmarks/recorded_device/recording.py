"""Recordings of a narrow GPT with all tensors of a large one."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from typing_extensions import override

from benchmarks.common.trainer import quiet_trainer
from benchmarks.recorded_device.clocks import HOST, Operation
from benchmarks.recorded_device.device import RecordedDevice
from benchmarks.recorded_device.rates import Scale, flops_of
from benchmarks.recorded_device.watch import recorded_device
from benchmarks.step_time.models import TimedGpt
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.schedule.staggered import bucket_size
from lightning_zenflow.worker.supervisor import SupervisedWorker

_TOKENS = 16

MEASURED_STEPS = 4
"""At the end of a recording: a window of S = 4."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Operations of a training, in the order in which the host came to them."""

    operations: Sequence[Operation]
    params: int
    """Of the recorded model."""
    matrices: Sequence[int]
    """Elements of each of its matrices."""
    steps: Sequence[int]
    """Settled ones, to be measured; the first of them has one before it."""

    def of_step(self, step: int) -> Sequence[Operation]:
        """Operations from the end of the step before to that of `step`."""
        ends = {o.event: i for i, o in enumerate(self.operations) if o.kind == "step"}
        return self.operations[ends[step - 1] + 1 : ends[step]]

    def scale(self, params: float, tokens: float) -> Scale:
        """To a model and batch of true size."""
        return Scale(
            params=params,
            tokens=tokens,
            recorded_params=self.params,
            recorded_matrices=sum(self.matrices),
            recorded_tokens=_TOKENS,
            recorded_flops=flops_of(self.of_step(self.steps[-1])),
            matrix_numel=min(self.matrices),
        )


class StepEnds(pl.Callback):
    """Marks the ends of steps among the operations."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._device.note("step", HOST, event=trainer.global_step)


def record_gpt(*, update_interval: int, publish_lag: int, model: float = 1.5e9) -> Recording:
    """Trains on the recorded device until the schedule has settled.

    The host never sees an answer of the worker before it waits for it, as beside a device that runs behind.

    Args:
        update_interval: S.
        publish_lag: d.
        model: key of `step_time.models.SHAPES`: the true size. It determines the number of layers and of DeepSpeed's buckets.
    """
    n_steps = update_interval + publish_lag + 3 + MEASURED_STEPS
    module = TimedGpt(steps=n_steps, params=model, batch=1, tokens=_TOKENS, narrow=True)
    numel = sum(p.numel() for p in module.parameters())
    strategy = ZenFlowStrategy(
        topk_ratio=0.05,
        update_interval=update_interval,
        publish_lag=publish_lag,
        select_interval=0,
        overlap_comm=True,
        reduce_bucket_size=-(-numel * bucket_size(round(model)) // round(model)),
    )
    with ExitStack() as stack:
        device = stack.enter_context(recorded_device())
        stack.enter_context(patch.object(SupervisedWorker, "has_answered", lambda self, submission: False))
        # Its batches are numbers that nothing reads.
        stack.enter_context(patch.object(ZenFlowStrategy, "batch_to_device", lambda self, batch, *_, **__: batch))
        quiet_trainer(
            strategy=strategy,
            max_steps=n_steps,
            limit_val_batches=0,
            precision="bf16-true",
            gradient_clip_val=1.0,
            callbacks=[StepEnds(device)],
        ).fit(module)
    return Recording(
        operations=device.order.operations,
        params=numel,
        matrices=[p.numel() for p in module.parameters() if p.dim() > 1],
        steps=range(n_steps - MEASURED_STEPS + 1, n_steps + 1),
    )
