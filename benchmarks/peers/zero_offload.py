"""DeepSpeed's ZeRO-2 and ZeRO-3 as Lightning strategies, run as its users would run it.

Offloading needs a GPU under Lightning's `DeepSpeedStrategy`. Here it runs on the CPU by the part of `ZenFlowStrategy` that makes DeepSpeed
do so, and by nothing else of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.partition import Tile
from lightning_zenflow.deepspeed.config import set_bucket_size
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.deepspeed.trained_engine import in_place_of_deepspeeds, new_engine
from lightning_zenflow.worker.moments import CodedMoment, CodedMoments, first_scales


class ZeroOffload(ZenFlowStrategy):
    """ZeRO offload with the module's optimizer, for instance torch's AdamW on 32-bit master weights.

    Gradients have the buckets of `ZenFlowStrategy`, which are faster than Lightning's for models of less than 200 million parameters.

    Args:
        super_offload: DeepSpeed's SuperOffload; under stage 3.
        **options: of Lightning's `DeepSpeedStrategy`.
    """

    precision_class = DeepSpeedPrecision  # type: ignore[assignment]  # Lightning's own

    def __init__(self, *, super_offload: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._super_offload = super_offload

    @override
    def _format_config(self) -> None:
        super()._format_config()
        assert isinstance(self.config, dict)
        zero = self.config["zero_optimization"]
        # As DeepSpeed's guides advise; `ZenFlowStrategy` page-locks its own memory instead.
        for key in {"offload_optimizer", "offload_param"} & {*zero}:
            zero[key]["pin_memory"] = self.root_device.type == "cuda"
        if self._super_offload:
            zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.9}

    @override
    def _setup_model_and_optimizer(self, model: Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        assert isinstance(self.config, dict)
        set_bucket_size(self.config, model)
        engine = new_engine(model, optimizer, self.config, self.root_device, lr_scheduler)
        return engine, engine.optimizer

    # DeepSpeed counts micro-batches itself, and its ZenFlow the steps of a window by them.
    handles_gradient_accumulation = DeepSpeedStrategy.handles_gradient_accumulation

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return DeepSpeedStrategy.optimizer_step(self, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DeepSpeedStrategy.on_train_batch_start(self, batch, batch_idx)


class RoundedMoments(ZeroOffload):
    """Moments have values of `moments_dtype="int8"` between steps, both rounded to nearest; a step computes in 32 bits."""

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        # DeepSpeed's optimizer around the module's, whose state holds one flat partition for each parameter group.
        for state in self.deepspeed_engine.optimizer.optimizer.state.values():
            n = state["exp_avg"].numel()
            tile = Tile(slice=0, begin=0, rows=1, first_column=0, width=n)
            codes = torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8)
            moments = CodedMoments(*codes, torch.zeros(first_scales([tile])[-1], 2), [tile])
            of_names = {name: CodedMoment(moments, is_first=name == "exp_avg") for name in ("exp_avg_sq", "exp_avg")}
            for name, moment in of_names.items():
                moment.write(0, state[name])
            for name, moment in of_names.items():
                state[name].copy_(moment.read(0, n))
        return output


class NoOffload(ZeroOffload):
    """ZeRO-2 with the optimizer states on the device."""

    @override
    def _format_config(self) -> None:
        super()._format_config()
        # Not in the constructor: ZenFlowStrategy puts it there again.
        assert isinstance(self.config, dict)
        del self.config["zero_optimization"]["offload_optimizer"]


class _DroppingOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """Drops reduced gradients."""

    @override
    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        self.clear_grad_attribute(param)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.optimizer._opt_called = True


class _DroppingOptimizer3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Drops reduced gradients of stage 3, and has no state. Private: all that it overrides but `step`."""

    @override
    def _setup_for_real_optimizer(self) -> None:
        for dtype, bucket in self.ipg_buckets.items():
            device = get_accelerator().current_device_name()
            bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=device)

    @override
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        for parameter in params_to_release:
            parameter.grad = None

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._pre_step()
        self._partition_all_parameters()
        self.optimizer._opt_called = True


class Floor(ZeroOffload):
    """Lower bound of a step: the model, Lightning, DeepSpeed's engine, buckets and fetches; gradients are dropped."""

    @override
    def _setup_model_and_optimizer(self, model: Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        assert isinstance(self.config, dict)
        is_3 = self.config["zero_optimization"]["stage"] == 3
        ours, dropping = (
            (ZenFlowZero3Optimizer, _DroppingOptimizer3) if is_3 else (ZenFlowZeroOptimizer, _DroppingOptimizer)
        )
        with in_place_of_deepspeeds(ours, dropping, model):
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
