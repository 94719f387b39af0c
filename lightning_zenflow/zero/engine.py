"""The way of stage 1 and 2's optimizer into DeepSpeed's engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine as engine_module
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn import Module, Parameter

from lightning_zenflow.engine.substitution import in_place_of
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer


@contextmanager
def zenflow_optimizer(
    factory: Callable[..., ZenFlowZeroOptimizer], module: Module
) -> Iterator[list[ZenFlowZeroOptimizer]]:
    """As `in_place_of`, of the optimizer of ZeRO stage 1 and 2, which ``deepspeed.runtime.engine`` imports.

    Args:
        factory: makes the optimizer, with DeepSpeed's arguments.
        module: the model that DeepSpeed initialises in this context. Parameters in another memory format (`torch.channels_last`) are
            contiguous from now on.
    """
    scalars = _lay_out_for_broadcast(module)

    def restore_scalars() -> None:
        for scalar in scalars:
            scalar.data = scalar.data.view(())

    def build(*args: Any, **kwargs: Any) -> ZenFlowZeroOptimizer:
        restore_scalars()
        return factory(*args, **kwargs)

    try:
        with in_place_of(DeepSpeedZeroOptimizer, engine_module, build, ZenFlowZeroOptimizer) as built:
            yield built
    finally:
        restore_scalars()


def _lay_out_for_broadcast(module: Module) -> list[Parameter]:
    """Makes every parameter contiguous, with a dimension at least; returns the scalars, which need their shape back for the optimizer.

    DeepSpeed's engine broadcasts each parameter as a tensor of bytes, which torch makes of such memory only. Its optimizer, which comes
    next, copies all trained parameters into contiguous memory anyway.
    """
    scalars = [p for p in module.parameters() if p.dim() == 0]
    for parameter in module.parameters():
        flat = parameter.data.reshape(-1)
        if flat.stride() != (1,):
            # Not by `contiguous`: it leaves the stride of one element as it is.
            flat = flat.clone(memory_format=torch.contiguous_format)
        parameter.data = flat.view(parameter.shape or (1,))
    return scalars
