"""DeepSpeed's ZeRO-2 as Lightning strategies, run as its users would run it.

Offloading needs a GPU under Lightning's `DeepSpeedStrategy`. Here it runs on the CPU by the part of `ZenFlowStrategy` that makes DeepSpeed
do so, and by nothing else of it.
"""

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.engine.config import set_bucket_size
from lightning_zenflow.zero.engine import zenflow_optimizer


class ZeroOffload(ZenFlowStrategy):
    """ZeRO-2 offload with the module's optimizer, for instance torch's AdamW on 32-bit master weights.

    Args:
        default_buckets: use Lightning's default bucket size. It is slower for models of less than 200 million parameters than the bucket
            size of `ZenFlowStrategy`, which is the default here.
        **options: of Lightning's `DeepSpeedStrategy`.
    """

    def __init__(self, *, default_buckets: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._default_buckets = default_buckets

    @override
    def _format_config(self) -> None:
        super()._format_config()
        assert isinstance(self.config, dict)
        # As DeepSpeed's guides advise; `ZenFlowStrategy` page-locks its own memory instead.
        self.config["zero_optimization"]["offload_optimizer"]["pin_memory"] = self.root_device.type == "cuda"

    @override
    def _setup_model_and_optimizer(self, model: Module, *args: Any, **kwargs: Any) -> Any:
        if not self._default_buckets:
            assert isinstance(self.config, dict)
            set_bucket_size(self.config, model)
        return DeepSpeedStrategy._setup_model_and_optimizer(self, model, *args, **kwargs)

    # DeepSpeed counts micro-batches itself, and its ZenFlow the steps of a window by them.
    handles_gradient_accumulation = DeepSpeedStrategy.handles_gradient_accumulation

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return DeepSpeedStrategy.optimizer_step(self, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DeepSpeedStrategy.on_train_batch_start(self, batch, batch_idx)


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


class Floor(ZeroOffload):
    """Lower bound of a step: the model, Lightning, DeepSpeed's engine and buckets; gradients are dropped."""

    @override
    def _setup_model_and_optimizer(self, model: Module, *args: Any, **kwargs: Any) -> Any:
        with zenflow_optimizer(_DroppingOptimizer, model):
            return super()._setup_model_and_optimizer(model, *args, **kwargs)
