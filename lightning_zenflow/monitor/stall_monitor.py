"""Callback that logs stall metrics during training, and a summary at its end."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_zenflow.monitor.interface import monitored_strategy, rank_zero_optimizer
from lightning_zenflow.monitor.metrics import METRICS
from lightning_zenflow.monitor.step_meter import StepMeter

PROGRESS_BAR_KEY = "stall_%"

_PROGRESS_BAR_PERIOD_NS = 1_000_000_000


class StallMonitor(pl.Callback):
    """Logs stall, overlap, traffic, selection and memory metrics through the trainer's loggers, every `log_every_n_steps` steps.

    `ZenFlowStrategy` adds one unless `stall_monitor` is false. docs/tuning.md lists all metrics. They are those of rank zero; the callback
    does nothing on other ranks. It never synchronises the device, whose times are read a step or more later.

    Args:
        progress_bar: show the device's idle time in percent in the progress bar, updated at most once a second.
        summary: log a table and a sentence of advice at the end of fit.
    """

    def __init__(self, *, progress_bar: bool = True, summary: bool = True) -> None:
        self._progress_bar = progress_bar
        self._summary = summary
        self._meter: StepMeter | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        monitored_strategy(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = rank_zero_optimizer(trainer)
        self._meter = None
        if optimizer is None:
            return
        self._global_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(tensorboard_layout())
        self._meter = StepMeter(optimizer)
        self._bar_due_ns = self._meter.end_ns
        self._sample_copies(trainer, self._meter)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._meter is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._meter.end_step()
        if self._logs(trainer) and self._global_step % _log_interval(trainer) == 0:
            self._log(trainer, self._meter)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._meter.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._meter.resume()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None and self._summary:
            summary = self._meter.summary(monitored_strategy(trainer).zenflow_config)
            if summary is not None:
                rank_zero_info(summary)
        self._meter = None

    def _log(self, trainer: pl.Trainer, meter: StepMeter) -> None:
        metrics = meter.metrics()
        for logger in trainer.loggers:
            # Lightning logs a step's own metrics under the same number, counted from 0.
            logger.log_metrics(metrics, step=self._global_step - 1)
        if self._shows_bar(trainer) and meter.end_ns >= self._bar_due_ns:
            self._bar_due_ns = meter.end_ns + _PROGRESS_BAR_PERIOD_NS
            # Not by `log`, which makes it one of `trainer.callback_metrics` as well, the model's own results.
            trainer.progress_bar_metrics[PROGRESS_BAR_KEY] = metrics["zenflow/stall/device_percent"]
        self._sample_copies(trainer, meter)

    def _sample_copies(self, trainer: pl.Trainer, meter: StepMeter) -> None:
        """Requests a recording of the step before the next logged one, unless the last recording is incomplete."""
        if self._logs(trainer):
            interval = _log_interval(trainer)
            until_logged = interval - trainer.global_step % interval
            meter.sample_copies(skip=max(0, until_logged - 2))

    def _shows_bar(self, trainer: pl.Trainer) -> bool:
        return self._progress_bar and trainer.progress_bar_callback is not None

    def _logs(self, trainer: pl.Trainer) -> bool:
        """True if the trainer has a logger or a progress bar to log to."""
        return _log_interval(trainer) > 0 and (bool(trainer.loggers) or self._shows_bar(trainer))


def _log_interval(trainer: pl.Trainer) -> int:
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
    return interval


def tensorboard_layout() -> dict[str, dict[str, list[Any]]]:
    """The page *Custom Scalars*: a chart for each metric, in groups; for `SummaryWriter.add_custom_scalars`.

    TensorBoard has one colour for each run, so a chart with two metrics would show two lines of the same colour.
    """
    charts: dict[str, dict[str, list[Any]]] = {}
    for name in METRICS:
        _, group, metric = name.split("/")
        # Tags are regular expressions.
        charts.setdefault(f"ZenFlow {group}", {})[metric.replace("_", " ")] = ["Multiline", [f"^{name}$"]]
    return charts
