"""The Trainer's callback that logs metrics of steps and their summary (`step_meter`)."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.optimizer.offload_adamw import OffloadAdamW
from lightning_zenflow.step_meter import OVERVIEW, StepMeter
from lightning_zenflow.training import Training


class StallMonitor(pl.Callback):
    """Logs the metrics of docs/tuning.md through the trainer's loggers, every `log_every_n_steps` steps.

    `ZenFlowStrategy` adds one unless `stall_monitor` is false; under other strategies the steps are those of `OffloadAdamW`, the second of
    which has names that end in "-1". Metrics are those of rank zero, each from its first value but zero on. The device is never
    synchronised. At the end of fit, averages go to `trainer.callback_metrics`, after `log_every_n_steps` steps or more.

    Args:
        progress_bar: show the device's idle time in percent in the progress bar.
        summary: log times, waits and a line of advice at the end of fit.
        summary_from: smallest number of steps of a fit with a summary, at least 2, as averages leave out the first; the strategy's has 50.
    """

    def __init__(self, *, progress_bar: bool = True, summary: bool = True, summary_from: int = 2) -> None:
        self._progress_bar = progress_bar
        self._summary_from = summary_from if summary else math.inf
        self._meters: Callable[[], list[StepMeter]] = list
        self._logged = set[str]()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Before the strategy's own set-up: after an error it has the arena of the fit before.
        self._meters = list

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        meters = _meters_of(trainer)
        if trainer.is_global_zero:
            self._meters, self._logged = meters, set()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        meters = self._meters()
        for meter in meters:
            meter.end_step()
        # None behind the micro-batches that end no step.
        if trainer.global_step % _log_interval(trainer) or not (metrics := _named([m.metrics() for m in meters])):
            return
        known = len(self._logged)
        # Charts of zeros say nothing, but for that of the waits.
        self._logged.update(name for name, value in metrics.items() if value or name == OVERVIEW[0])
        shown = {name: value for name, value in metrics.items() if name in self._logged}
        for logger in trainer.loggers:
            writer: Any = getattr(logger, "experiment", None)
            if len(self._logged) > known and hasattr(writer, "add_custom_scalars"):
                writer.add_custom_scalars(tensorboard_layout(self._logged))
            # Lightning logs a step's own metrics under the same number, counted from 0.
            logger.log_metrics(shown, step=trainer.global_step - 1)
        stall = metrics.get(OVERVIEW[0])
        if stall is not None and self._progress_bar and trainer.progress_bar_callback is not None:
            # Not by `log`, which makes it one of `trainer.callback_metrics` as well, the model's own results.
            trainer.progress_bar_metrics["stall_%"] = stall

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for meter in self._meters():
            meter.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for meter in self._meters():
            meter.resume()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        least = min(_log_interval(trainer), self._summary_from)
        meters = self._meters()
        # Not before: the callbacks that monitor the model's own results would find them there.
        of_fit = _named([meter.averages() if len(meter.step_s) >= least else {} for meter in meters])
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in of_fit.items()}
        )
        for meter in meters:
            meter.sum_up(self._summary_from)
        self._meters = list


def tensorboard_layout(logged: Collection[str]) -> dict[str, dict[str, list[Any]]]:
    """The page *Custom Scalars*: a chart for each of these metrics, in groups; for TensorBoard's `SummaryWriter.add_custom_scalars`."""
    # TensorBoard has one colour for each run: two metrics in a chart would look alike. Tags are regular expressions.
    groups: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(logged, key=[*OVERVIEW, *sorted(logged)].index):
        group = "overview" if name in OVERVIEW else name.split("/")[1]
        groups.setdefault(f"ZenFlow {group}", {})[name] = ["Multiline", [f"^{name}$"]]
    return groups


def _log_interval(trainer: pl.Trainer) -> float:
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
    return interval if interval > 0 else math.inf


def _named(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several optimizers, by names as Lightning's `LearningRateMonitor` gives them."""
    return {f"{name}-{i}" if i else name: value for i, of_one in enumerate(metrics) for name, value in of_one.items()}


def _meters_of(trainer: pl.Trainer) -> Callable[[], list[StepMeter]]:
    """What gives the meter of the strategy, or those of the optimizers that have had a gradient."""
    strategy: Any = trainer.strategy  # strategies are above this layer
    if hasattr(strategy, "zenflow_optimizer"):
        if strategy.zenflow_optimizer is None:
            return list
        training: Training = strategy.zenflow_optimizer.training
        meter = StepMeter(training.parts, training.config)
        return lambda: [meter]
    optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, OffloadAdamW)]
    if not optimizers:
        raise MisconfigurationException(
            f"StallMonitor: strategy must be ZenFlowStrategy, or an optimizer OffloadAdamW, got {type(strategy).__name__} with"
            f" {', '.join(type(optimizer).__name__ for optimizer in trainer.optimizers)}; remove the callback"
        )
    return lambda: [optimizer.meter for optimizer in optimizers if optimizer.meter is not None]
