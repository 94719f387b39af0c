"""The strategy and its monitor for the Trainer of the package `pytorch_lightning`, whose classes are not those of `lightning.pytorch`.

The import makes the names "zenflow" and "zenflow_adamw" known to that Trainer.
"""

from types import ModuleType
from typing import ClassVar

import pytorch_lightning as pl
from pytorch_lightning.plugins import DeepSpeedPrecision
from pytorch_lightning.strategies import DeepSpeedStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_zenflow import register
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import catch_as
from lightning_zenflow.stall_monitor import StallMonitor as LightningsMonitor
from lightning_zenflow.steps import TrainerPrecision
from lightning_zenflow.strategy import TrainerStrategy

__all__ = ["StallMonitor", "ZenFlowConfig", "ZenFlowStrategy"]


# Annotations name the classes of `lightning.pytorch`, whose `Callback` does nothing itself.
class StallMonitor(LightningsMonitor, pl.Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = LightningsMonitor.__doc__


class ZenFlowPrecision(TrainerPrecision, DeepSpeedPrecision):  # type: ignore[misc]
    """`TrainerPrecision` for the Trainer of `pytorch_lightning`."""


class ZenFlowStrategy(TrainerStrategy, DeepSpeedStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = TrainerStrategy.__doc__

    lightning: ClassVar[ModuleType] = pl
    stall_monitor = StallMonitor
    precision_class = ZenFlowPrecision


catch_as(MisconfigurationException)
register(StrategyRegistry, __name__)
