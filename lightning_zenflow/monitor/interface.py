"""The part of strategy and optimizer that monitors read, as protocols: monitors import neither class."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.step.readings import CounterReader
from lightning_zenflow.telemetry.telemetry import Telemetry


class MonitoredOptimizer(Protocol):
    """The ZenFlow optimizer of one rank."""

    counters: CounterReader
    telemetry: Telemetry
    dtype: torch.dtype
    """Of the model's weights."""

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None after its end."""

    @property
    def worker_cores(self) -> Sequence[int]:
        """Logical cores of the worker."""


@runtime_checkable
class MonitoredStrategy(Protocol):
    """The strategy of the trainer."""

    @property
    def zenflow_config(self) -> ZenFlowConfig:
        """The configuration of the current or last fit."""

    @property
    def zenflow_optimizer(self) -> MonitoredOptimizer | None:
        """The optimizer of the current or last fit; None before the first."""


def monitored_strategy(trainer: pl.Trainer) -> MonitoredStrategy:
    """Returns the trainer's strategy.

    Raises:
        MisconfigurationException: it is not a `ZenFlowStrategy`.
    """
    strategy: object = trainer.strategy
    if not isinstance(strategy, MonitoredStrategy):
        raise MisconfigurationException(
            f"StallMonitor: strategy must be ZenFlowStrategy, got {type(strategy).__name__}; remove the callback or change the strategy"
        )
    return strategy


def rank_zero_optimizer(trainer: pl.Trainer) -> MonitoredOptimizer | None:
    """The optimizer on rank zero, whose numbers are shown; None on all other ranks."""
    return monitored_strategy(trainer).zenflow_optimizer if trainer.is_global_zero else None
