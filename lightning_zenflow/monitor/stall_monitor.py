"""Callback that logs stall metrics during training, and a summary at its end."""

import time
from array import array
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_zenflow.deferred.publish import EXPOSED_COPIES
from lightning_zenflow.monitor.interface import MonitoredOptimizer, monitored_strategy, rank_zero_optimizer
from lightning_zenflow.monitor.metrics import CopySample, interval_metrics
from lightning_zenflow.monitor.summary import Training, summary
from lightning_zenflow.monitor.tensorboard import Dashboard
from lightning_zenflow.telemetry.counters import Reading
from lightning_zenflow.telemetry.tracing import Recording

PROGRESS_BAR_KEY = "stall_%"

_PROGRESS_BAR_PERIOD_NS = 1_000_000_000


class StallMonitor(pl.Callback):
    """Logs stall, overlap, traffic, selection and memory metrics through the trainer's loggers, every `log_every_n_steps` steps.

    `ZenFlowStrategy` adds one unless `stall_monitor` is false. docs/metrics.md lists all metrics. They are those of rank zero; the callback
    does nothing on other ranks. It never synchronises the device, whose times are read a step or more later.

    Args:
        progress_bar: show the device's idle time in percent in the progress bar, updated at most once a second.
        summary: log a table and a sentence of advice at the end of fit.
        figure_every_n_steps: interval of drawings of three steps in TensorBoard, each of which synchronises a CUDA device once; 0: none.
            Needs matplotlib.
    """

    def __init__(self, *, progress_bar: bool = True, summary: bool = True, figure_every_n_steps: int = 1000) -> None:
        self._progress_bar = progress_bar
        self._figure_every_n_steps = figure_every_n_steps
        self._summary = summary
        self._optimizer: MonitoredOptimizer | None = None
        self._step_s = array("d")
        self._n_logged = 0
        self._recording: Recording | None = None
        self._copies: CopySample | None = None
        self._dashboards: list[Dashboard] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        monitored_strategy(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._optimizer = rank_zero_optimizer(trainer)
        if self._optimizer is None:
            return
        self._step_s = array("d")
        self._n_logged = 0
        self._recording = self._copies = None
        self._global_step = trainer.global_step
        self._logged = self._before = _read(self._optimizer)
        self._sample_copies(trainer, self._optimizer)
        self._dashboards = [
            Dashboard(logger.experiment, self._optimizer, figure_every_n_steps=self._figure_every_n_steps)
            for logger in trainer.loggers
            if isinstance(logger, TensorBoardLogger)
        ]
        self._last_ns = self._bar_due_ns = time.perf_counter_ns()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._optimizer is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        now_ns = time.perf_counter_ns()
        self._step_s.append(1e-9 * (now_ns - self._last_ns))
        self._last_ns = now_ns
        if len(self._step_s) == 1:
            # The summary leaves out the first step, which is synchronous and allocates memory.
            self._before = _read(self._optimizer)
        if self._logs(trainer) and self._global_step % _log_interval(trainer) == 0:
            self._log(trainer, pl_module, self._optimizer)
        for dashboard in self._dashboards:
            dashboard.end_step(self._global_step)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._optimizer is not None:
            self._pause_ns = time.perf_counter_ns()
            self._waited_s = sum(self._optimizer.telemetry.stalls.seconds.values())

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._optimizer is not None:
            # A step's time excludes validation, but not the flush before it, which is a stall.
            waited_s = sum(self._optimizer.telemetry.stalls.seconds.values()) - self._waited_s
            self._last_ns += time.perf_counter_ns() - self._pause_ns - round(1e9 * waited_s)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._optimizer is None:
            return
        if self._summary and len(self._step_s) > 1:
            training = Training(
                step_s=self._step_s[1:],
                config=monitored_strategy(trainer).zenflow_config,
                worker_cores=len(self._optimizer.worker_cores),
                dtype_bytes=self._optimizer.dtype.itemsize,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
            )
            rank_zero_info(summary(training, self._before, _read(self._optimizer)))
        self._optimizer = None
        self._dashboards = []

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: MonitoredOptimizer) -> None:
        before, self._logged = self._logged, _read(optimizer)
        if self._recording is not None and self._recording.complete:
            trace = self._recording.steps[0]
            self._copies = CopySample(
                d2h=trace.copied("d2h copies"),
                h2d=trace.copied("h2d copies"),
                exposed_h2d_s=trace.copied("h2d copies", EXPOSED_COPIES)[1],
            )
            self._recording = None
        seconds = sum(self._step_s[self._n_logged :])
        self._n_logged = len(self._step_s)
        metrics = interval_metrics(before, self._logged, seconds=seconds, copies=self._copies)
        for logger in trainer.loggers:
            # Lightning logs a step's own metrics under the same number, counted from 0.
            logger.log_metrics(metrics, step=self._global_step - 1)
        if self._shows_bar(trainer) and self._last_ns >= self._bar_due_ns:
            # This call costs as much as logging all metrics.
            self._bar_due_ns = self._last_ns + _PROGRESS_BAR_PERIOD_NS
            # A CPU tensor: Lightning would synchronise the device to read a CUDA tensor.
            percent = torch.tensor(metrics["zenflow/stall/device_percent"])
            pl_module.log(PROGRESS_BAR_KEY, percent, prog_bar=True, logger=False, on_step=True, on_epoch=False)
        self._sample_copies(trainer, optimizer)

    def _sample_copies(self, trainer: pl.Trainer, optimizer: MonitoredOptimizer) -> None:
        """Requests a recording of the step before the next logged one, unless the last recording is incomplete."""
        if self._recording is None and self._logs(trainer):
            interval = _log_interval(trainer)
            until_logged = interval - trainer.global_step % interval
            self._recording = optimizer.telemetry.tracer.record(skip=max(0, until_logged - 2), steps=1)

    def _shows_bar(self, trainer: pl.Trainer) -> bool:
        return self._progress_bar and trainer.progress_bar_callback is not None

    def _logs(self, trainer: pl.Trainer) -> bool:
        """True if the trainer has a logger or a progress bar to log to."""
        return _log_interval(trainer) > 0 and (bool(trainer.loggers) or self._shows_bar(trainer))


def _read(optimizer: MonitoredOptimizer) -> Reading:
    return optimizer.counters.read(worker_pid=optimizer.worker_pid)


def _log_interval(trainer: pl.Trainer) -> int:
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
    return interval
