"""The strategy for the Trainer of `lightning.pytorch`."""

from types import ModuleType
from typing import ClassVar

import lightning.pytorch as pl
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_zenflow.stall_monitor import StallMonitor
from lightning_zenflow.trainer import TrainerStrategy
from lightning_zenflow.trainer_steps import TrainerPrecision


class ZenFlowPrecision(TrainerPrecision, DeepSpeedPrecision):
    """`TrainerPrecision`, which says all of it, for the Trainer of `lightning.pytorch`."""


class ZenFlowStrategy(TrainerStrategy, DeepSpeedStrategy):  # noqa: D101
    __doc__ = TrainerStrategy.__doc__

    precision_class = ZenFlowPrecision
    lightning: ClassVar[ModuleType] = pl
    stall_monitor = StallMonitor
