"""The strategy and the optimizer that monitors read. Strategies are above this layer, so their part is a protocol."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zenflow.config import ZenFlowConfig

if TYPE_CHECKING:
    from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer


@runtime_checkable
class MonitoredStrategy(Protocol):
    """The strategy of the trainer."""

    @property
    def zenflow_config(self) -> ZenFlowConfig:
        """The configuration of the current or last fit."""

    @property
    def zenflow_optimizer(self) -> "ZenFlowZeroOptimizer | None":
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


def rank_zero_optimizer(trainer: pl.Trainer) -> "ZenFlowZeroOptimizer | None":
    """The optimizer on rank zero, whose numbers are shown; None on all other ranks."""
    return monitored_strategy(trainer).zenflow_optimizer if trainer.is_global_zero else None
