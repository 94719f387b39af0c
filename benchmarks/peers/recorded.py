"""ZeRO-Offload with spans around its phases, for the picture of `benchmarks.step_time.timelines`."""

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.peers.zero_offload import ZeroOffload
from lightning_zenflow.telemetry.tracing import Tracer
from lightning_zenflow.zero.engine import zenflow_optimizer


class _RecordedOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's ZeRO-Offload, unchanged, for one parameter group on the CPU."""

    def __init__(self, *args: Any, tracer: Tracer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._n_steps = 0
        self._tracer.begin_step(1)

    # Private names of DeepSpeed: the copy of one parameter's gradient, and the optimizer's step.
    @override
    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, param: Tensor) -> None:
        with self._tracer.span("d2h copies", n_bytes=4 * param.numel()):
            super().async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)

    @override
    def scaled_global_norm(self, norm_type: int = 2) -> Any:
        with self._tracer.span("exact step", "norm"):
            return super().scaled_global_norm(norm_type)

    @override
    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        with self._tracer.span("exact step", "clip"):
            super().unscale_and_clip_grads(grad_groups_flat, total_norm)

    @override
    def _optimizer_step(self, group_no: int) -> None:
        with self._tracer.span("exact step", "AdamW"):
            super()._optimizer_step(group_no)
        # The rest of the step: rounding, the copy, and gathering the ranks' weights.
        n_bytes = self.parallel_partitioned_bit16_groups[group_no][0].nbytes
        self._rest.enter_context(self._tracer.span("h2d copies", n_bytes=n_bytes))

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        begin_ns = time.perf_counter_ns()
        with ExitStack() as self._rest:
            super().step(closure)
        self._tracer.add_wait("the CPU's step", begin_ns, time.perf_counter_ns(), None)
        self._n_steps += 1
        self._tracer.begin_step(self._n_steps + 1)


class RecordedZeroOffload(ZeroOffload):
    """Records the phases of the device and the CPU.

    Attributes:
        tracer: holds the recordings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tracer = Tracer(torch.device("cpu"))

    @override
    def _setup_model_and_optimizer(self, model: Module, *args: Any, **kwargs: Any) -> Any:
        with zenflow_optimizer(functools.partial(_RecordedOptimizer, tracer=self.tracer), model), self._with_index():
            return DeepSpeedStrategy._setup_model_and_optimizer(self, model, *args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.tracer.span("forward"):
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.tracer.span("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
