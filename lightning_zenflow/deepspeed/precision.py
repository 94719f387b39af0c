"""Mixins of Lightning's `DeepSpeedPrecision`: batches, clipping and closures as under Lightning's other strategies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer

_types = WeakTensorKeyDictionary()
"""Of parameters that are float32 for as long as they are trained."""


def restore_types(module: Module) -> None:
    """Gives the parameters of a module the types that they had before `convert_module`, after training."""
    for parameter in module.parameters():
        if parameter in _types:
            parameter.data = parameter.data.to(_types[parameter])
            del _types[parameter]


class PlainPrecision(OtherBases):  # type: ignore[misc]
    """Leaves what a model gets, and gives, as it is with "32-true": float64 stays float64."""

    @override
    def convert_module(self, module: Module) -> Module:
        """With "32-true", buffers and frozen parameters keep their types; trained ones become float32, as their master weights are, and
        so do those with a fraction that are in one module with them, until `restore_types`.
        """
        if self.precision != "32-true":
            converted: Module = super().convert_module(module)
            return converted
        others = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.dtype != torch.float32]
        trained = {parameter for _, parameter in others}
        for part in module.modules():
            own = [p for p in part.parameters(recurse=False) if p.is_floating_point()]
            if not trained.isdisjoint(own):
                for parameter in own:
                    if parameter not in _types:
                        _types[parameter] = parameter.dtype
                    parameter.data = parameter.data.float()
        if others:
            rank_zero_info(
                f"ZenFlow: {len(others)} trained parameters are float32 in training with precision='32-true', {others[0][0]} the first;"
                " freeze them to keep their types, or set another precision"
            )
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_input(data)


class TrainerPrecision(PlainPrecision):
    """With mixed precision batches stay as they are as well, and operations choose their type by `torch.autocast`; weights have 16 bits.

    Attributes:
        max_norm: DeepSpeed's `gradient_clipping`, of steps for which the Trainer and the module clip nothing.
        norm_of_step: largest norm of the next step; None: `clip_gradients` has not been called for it.
    """

    max_norm = 0.0
    norm_of_step: float | None = None

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
        # In manual optimization the step's last backward pass may have been any.
        optimizer.zenflow_step.complete()
        optimizer.clip_grad = self.max_norm if self.norm_of_step is None else self.norm_of_step
        # Private: calls `on_before_optimizer_step` and, by `configure_gradient_clipping`, `clip_gradients`.
        self._after_closure(model, optimizer)
        self.norm_of_step = None
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
            optimizer = getattr(optimizer, "_optimizer", optimizer)
            norm = float(clip_val)
            # Who clips twice has clipped to the smaller norm.
            self.norm_of_step = norm if self.norm_of_step is None else min(norm, self.norm_of_step)
            optimizer.clip_grad = self.norm_of_step
