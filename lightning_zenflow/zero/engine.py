"""The way of stage 1 and 2's optimizer into DeepSpeed's engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import deepspeed.runtime.engine as engine_module
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn import Module

from lightning_zenflow.engine.substitution import in_place_of
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer


def zenflow_optimizer(
    factory: Callable[..., ZenFlowZeroOptimizer], module: Module
) -> AbstractContextManager[list[ZenFlowZeroOptimizer]]:
    """As `in_place_of`, of the optimizer of ZeRO stage 1 and 2, which the engine's module imports."""
    return in_place_of(DeepSpeedZeroOptimizer, engine_module, factory, ZenFlowZeroOptimizer, module)
