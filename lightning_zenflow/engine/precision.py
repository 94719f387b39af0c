"""Mixins of Lightning's `DeepSpeedPrecision`: batches, clipping and closures as under Lightning's other strategies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.nn import Module
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.engine.optimizer import ZenFlowOptimizer

_LightningsPrecision: Any = object
"""What comes after the mixin in the order of base classes."""


class PlainPrecision(_LightningsPrecision):  # type: ignore[misc]
    """Leaves what a model gets, and gives, as it is with "32-true": float64 stays float64."""

    @override
    def convert_module(self, module: Module) -> Module:
        """With "32-true" all weights keep their types; `refuse_other_types` refuses to train those that are not float32."""
        converted: Module = module if self.precision == "32-true" else super().convert_module(module)
        return converted

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_input(data)


class TrainerPrecision(PlainPrecision):
    """With mixed precision batches stay as they are as well, and operations choose their type by `torch.autocast`; weights have 16 bits.

    Attributes:
        max_norm: DeepSpeed's `gradient_clipping`, of steps for which the Trainer and the module clip nothing.
    """

    max_norm = 0.0

    @override
    def convert_input(self, data: Any) -> Any:
        return data if "mixed" in self.precision else super().convert_input(data)

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        if "mixed" not in self.precision:
            context: AbstractContextManager[None] = super().forward_context()
            return context
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return torch.autocast(get_accelerator().device_name(), dtype=dtype, cache_enabled=False)

    @override
    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure, which may have been run before, the hooks between backward and step, and the step.

        Raises:
            MisconfigurationException: something wraps the optimizer.
        """
        if not isinstance(optimizer, ZenFlowOptimizer):
            kind = type(optimizer)
            raise MisconfigurationException(
                f"ZenFlowStrategy: trainer.optimizers must be the strategy's own, got {kind.__module__}.{kind.__qualname__}, whose"
                " `step` is not called: use hooks such as `on_train_batch_end`, or `register_step_post_hook` of the optimizer"
            )
        result = closure()
        optimizer.clip_grad = self.max_norm
        # Private: calls `on_before_optimizer_step` and, by `configure_gradient_clipping`, `clip_gradients`.
        self._after_closure(model, optimizer)
        model.trainer.model.step(**kwargs)
        return result

    @override
    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Sets the largest norm of this step, which may be another one in each step.

        Raises:
            MisconfigurationException: `gradient_clip_algorithm` is not "norm".
        """
        if clip_val > 0:
            if gradient_clip_algorithm != "norm":
                raise MisconfigurationException(
                    f"gradient_clip_algorithm must be 'norm' under ZenFlowStrategy, got {str(gradient_clip_algorithm)!r}"
                )
            # A module may give the Trainer's wrapper of the optimizer.
            getattr(optimizer, "_optimizer", optimizer).clip_grad = float(clip_val)
