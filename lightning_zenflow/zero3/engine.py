"""The way of stage 3's optimizer into DeepSpeed's engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager

# Before the name is replaced: it has a subclass of the class.
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
import deepspeed.runtime.zero.stage3 as stage3_module
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.nn import Module

from lightning_zenflow.engine.substitution import in_place_of
from lightning_zenflow.zero3.optimizer import REDUCE_BUCKET, ZenFlowZero3Optimizer


def zenflow_optimizer(
    factory: Callable[..., ZenFlowZero3Optimizer], module: Module
) -> AbstractContextManager[list[ZenFlowZero3Optimizer]]:
    """As `in_place_of`, of the optimizer of ZeRO stage 3, which the engine imports where it constructs it."""
    base = DeepSpeedZeroOptimizer_Stage3
    return in_place_of(base, stage3_module, factory, ZenFlowZero3Optimizer, module, calls=[REDUCE_BUCKET])
