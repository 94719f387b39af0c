"""Adds the monitors of a configuration to a trainer's callbacks."""

from pathlib import Path

import lightning.pytorch as pl

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.monitor.stall_monitor import StallMonitor
from lightning_zenflow.monitor.timeline import TimelineWriter


def attach_monitors(callbacks: list[pl.Callback], config: ZenFlowConfig) -> None:
    """Inserts `StallMonitor` and `TimelineWriter` where the configuration asks for them.

    Args:
        callbacks: the trainer's list, changed in place. A monitor of the user's own is kept instead.
        config: `stall_monitor`, `timeline` and `timeline_steps` are read.
    """
    if config.stall_monitor:
        insert_first(callbacks, StallMonitor())
    if config.timeline is not None:
        first, last = config.timeline_range
        insert_first(callbacks, TimelineWriter(Path(config.timeline), first=first, last=last))


def insert_first(callbacks: list[pl.Callback], callback: pl.Callback) -> None:
    """Inserts a callback in front of all others, unless the list has one of its class.

    At the end it would be behind the checkpoint callbacks, which Lightning keeps last.
    """
    if not any(isinstance(other, type(callback)) for other in callbacks):
        callbacks.insert(0, callback)
