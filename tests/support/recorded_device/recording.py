"""Marks in a recording."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from recorded_device.clocks import HOST
from recorded_device.device import RecordedDevice


class StepEnds(pl.Callback):
    """Marks the ends of steps among the operations."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._device.note("step", HOST, event=trainer.global_step)
