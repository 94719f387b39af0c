"""monitor.attach."""

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from lightning_zenflow.strategy import ZenFlowStrategy


def strategy_of(trainer: pl.Trainer) -> "ZenFlowStrategy":
    """The trainer's strategy.

    Raises:
        MisconfigurationException: it is another one.
    """
    from lightning_zenflow.strategy import ZenFlowStrategy  # which adds the callback

    if not isinstance(trainer.strategy, ZenFlowStrategy):
        raise MisconfigurationException(
            f"StallMonitor: strategy={type(trainer.strategy).__name__}: allowed is ZenFlowStrategy"
        )
    return trainer.strategy
