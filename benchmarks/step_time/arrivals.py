"""When do the gradients of a rank's own partition arrive in backward?"""

import time
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.step_time.models import SimulatedAccelerator
from lightning_zenflow.offload.step import ZenFlowStep

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the partition's elements: the first gradient, a quarter of them, and so on."""


class ArrivalTimer(pl.Callback):
    """Notes when gradients are routed on a simulated accelerator, in the steps after the warm-up.

    Args:
        warm_up: steps.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._begin_s = 0.0
        self._noted: list[tuple[float, int]] = []  # time, elements
        self._steps: list[list[float]] = []
        self._patch = mock.patch.object(ZenFlowStep, "receive", self._noting(ZenFlowStep.receive))

    def median(self) -> list[float]:
        """The parts of backward at which `SHARES` of the elements had arrived, medians over the steps; empty without any."""
        return torch.tensor(self._steps).quantile(0.5, dim=0).tolist() if self._steps else []

    def _noting(self, receive: Any) -> Any:
        def noted(step: ZenFlowStep, index: int, gradient: Tensor, **keys: Any) -> None:
            self._noted.append((time.perf_counter(), gradient.numel()))
            receive(step, index, gradient, **keys)

        return noted

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._patch.start()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._patch.stop()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._noted.clear()
        assert isinstance(pl_module, SimulatedAccelerator)
        # An asynchronous device may still compute the forward pass.
        self._begin_s = max(time.perf_counter(), pl_module.clock.idle_at)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step < self._warm_up or not self._noted:
            return
        length_s = time.perf_counter() - self._begin_s
        times, numels = zip(*self._noted, strict=True)
        arrived = torch.tensor(numels).cumsum(0) / sum(numels)
        places = torch.searchsorted(arrived, torch.tensor(SHARES)).clamp(max=len(times) - 1)
        self._steps.append([(times[place] - self._begin_s) / length_s for place in places])
