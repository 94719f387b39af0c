"""The Trainer's monitor: logs stall metrics during training and a summary at its end."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.monitor.summary import METRICS, StepMeter

if TYPE_CHECKING:
    from lightning_zenflow.training import Training

PROGRESS_BAR_KEY = "stall_%"


if TYPE_CHECKING:
    _Callback = pl.Callback
else:
    # Lightning has this class twice, for each of its Trainers: each front's is a subclass of one of them.
    _Callback = object


class StallMonitoring(_Callback):
    """Logs stall, overlap and selection metrics through the trainer's loggers, every `log_every_n_steps` steps.

    `ZenFlowStrategy` adds one unless `stall_monitor` is false. docs/tuning.md lists all metrics. They are those of rank zero; the callback
    does nothing on other ranks. It never synchronises the device, whose times are read a step or more later. At the end of fit, averages
    go to `trainer.callback_metrics`, after `log_every_n_steps` steps or more.

    Args:
        progress_bar: show the device's idle time in percent in the progress bar.
        summary: log times, waits and a line of advice at the end of fit.
        summary_from: smallest number of steps of a fit with a summary; at least 2, as its averages leave out the first one. The strategy's
            own monitor has 50: fewer say nothing about a training, and programs that fit many times would repeat it.
    """

    tensorboard_logger: ClassVar[type[Any]]
    """Of the same package as the callback's base class."""

    def __init__(self, *, progress_bar: bool = True, summary: bool = True, summary_from: int = 2) -> None:
        self._progress_bar = progress_bar
        self._summary_from = summary_from if summary else math.inf
        self._meter: StepMeter | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Before the strategy's own set-up: after an error it has the arena of the fit before.
        self._meter = None
        rank_zero_training(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        training = rank_zero_training(trainer)
        self._meter = None if training is None else StepMeter(training)
        if self._meter is None:
            return
        self._global_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, self.tensorboard_logger):
                logger.experiment.add_custom_scalars(tensorboard_layout())

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._meter is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._meter.end_step()
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
        if interval <= 0 or self._global_step % interval or not (metrics := self._meter.metrics()):
            return
        for logger in trainer.loggers:
            # Lightning logs a step's own metrics under the same number, counted from 0.
            logger.log_metrics(metrics, step=self._global_step - 1)
        if self._progress_bar and trainer.progress_bar_callback is not None:
            # Not by `log`, which makes it one of `trainer.callback_metrics` as well, the model's own results.
            trainer.progress_bar_metrics[PROGRESS_BAR_KEY] = metrics["zenflow/stall/device_percent"]

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
        if self._meter is None:
            return
        n: int = len(self._meter.step_s)
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # see above
        if n >= min(interval if interval > 0 else math.inf, self._summary_from):
            # Not before: the callbacks that monitor the model's own results would find them there.
            of_fit = self._meter.averages().items()
            trainer.callback_metrics.update(
                {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in of_fit}
            )
        if n >= self._summary_from and (said := self._meter.summary()):
            rank_zero_info(said)
        self._meter = None


class StallMonitor(StallMonitoring, pl.Callback):  # noqa: D101
    __doc__ = StallMonitoring.__doc__

    tensorboard_logger = TensorBoardLogger


def add_monitor(trainer: pl.Trainer, kind: type[StallMonitoring]) -> None:
    """Adds the strategy's own monitor to a Trainer, unless the user has given one."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
    if not any(isinstance(callback, StallMonitoring) for callback in callbacks):
        # First: at the end it would be behind the checkpoint callbacks, which Lightning keeps last.
        callbacks.insert(0, kind(summary_from=50))


def tensorboard_layout() -> dict[str, dict[str, list[Any]]]:
    """The page *Custom Scalars*: a chart for each metric, in groups; for `SummaryWriter.add_custom_scalars`.

    TensorBoard has one colour for each run, so a chart with two metrics would show two lines of the same colour.
    """
    # Tags are regular expressions.
    return {
        f"ZenFlow {group}": {name: ["Multiline", [f"^{name}$"]] for name in METRICS if name.split("/")[1] == group}
        for group in ("stall", "overlap", "selection")
    }


def rank_zero_training(trainer: pl.Trainer) -> "Training | None":
    """The training on rank zero, whose numbers are shown; None before the first fit, and on all other ranks.

    Raises:
        MisconfigurationException: the strategy is not a `ZenFlowStrategy`.
    """
    strategy: Any = trainer.strategy  # strategies are above this layer
    if not hasattr(strategy, "zenflow_optimizer"):
        raise MisconfigurationException(
            f"StallMonitor: strategy must be ZenFlowStrategy, got {type(strategy).__name__}; remove the callback or change the strategy"
        )
    if not trainer.is_global_zero or strategy.zenflow_optimizer is None:
        return None
    training: Training = strategy.zenflow_optimizer.training
    return training
