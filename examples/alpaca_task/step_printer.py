"""The callback that prints loss and time of each step, as DeepSpeed's ZenFlow example does: `Step 5, Loss: 1.2599, Time: 719.58ms`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override


class Mark:
    """A point in the device's work (CUDA) or in time (CPU)."""

    def __init__(self, device: torch.device) -> None:
        """Mark what `device` has been given to do so far."""
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._time = time.perf_counter()

    def passed(self) -> bool:
        """Whether the device has come here; does not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        """Milliseconds from `earlier` to here; both are passed."""
        if self._event is None:
            return (self._time - earlier._time) * 1e3
        assert earlier._event is not None, "both are marks of one device"
        return float(earlier._event.elapsed_time(self._event))


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step whose line is due once `end` is passed."""

    number: int
    loss: Tensor
    """Host scalar; written by the time `end` is passed."""
    start: Mark
    end: Mark


class StepPrinter(pl.Callback):
    """Prints a line for each optimizer step, on the first rank.

    Time is from the end of the step before to the end of this one, without validation. Nothing waits for the device: a line is printed when
    the device has finished its step, which may be a step or two later.
    """

    def __init__(self, *, every_n_steps: int = 1) -> None:
        """Print one line in `every_n_steps` steps."""
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"StepPrinter: every_n_steps={every_n_steps} is not allowed; it must be at least 1")
        self.every_n_steps = every_n_steps
        self._done = 0
        self._last: Mark | None = None
        self._loss: Tensor | None = None
        self._steps: deque[Step] = deque()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._done = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # After validation the end of the step before is no start.
        if self._last is None and trainer.is_global_zero:
            self._last = Mark(pl_module.device)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        # Lightning has divided it by accumulate_grad_batches.
        loss = outputs["loss"].detach()
        self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._done:
            return
        assert self._last is not None
        self._done = trainer.global_step
        on_host = self._loss.to("cpu", non_blocking=True)
        step = Step(number=self._done, loss=on_host, start=self._last, end=Mark(pl_module.device))
        self._last, self._loss = step.end, None
        if step.number % self.every_n_steps == 0:
            self._steps.append(step)
        self._print_finished(pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print_all(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print_all(pl_module)

    def _print_finished(self, pl_module: pl.LightningModule) -> None:
        while self._steps and self._steps[0].end.passed():
            step = self._steps.popleft()
            took = step.end.since(step.start)
            pl_module.print(f"Step {step.number}, Loss: {step.loss.item():.4f}, Time: {took:.2f}ms")

    def _print_all(self, pl_module: pl.LightningModule) -> None:
        if self._steps:
            self._steps[-1].end.wait()
        self._print_finished(pl_module)
        self._last = None
