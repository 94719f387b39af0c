"""The callback behind `ZenFlowStrategy(timeline=...)`: records a few steps and writes them to a file."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_zenflow.callbacks import strategy_of
from lightning_zenflow.optimizer import ZenFlowZeroOptimizer
from lightning_zenflow.timeline import chrome_trace, write_trace
from lightning_zenflow.tracing import Recording

_log = logging.getLogger(__name__)


class TimelineWriter(pl.Callback):
    """Writes the timeline of rank zero as soon as its steps are over.

    Args:
        path: the file, JSON.
        first: first step, counted from 1 where the fit starts; not the first one, before which a CUDA device could not be waited for.
        last: last step.
    """

    def __init__(self, path: Path, *, first: int, last: int) -> None:
        assert 1 < first <= last
        self._path = path
        self._first = first
        self._last = last
        self._optimizer: ZenFlowZeroOptimizer | None = None
        self._recording: Recording | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._recording = None
        self._optimizer = strategy_of(trainer).zenflow_optimizer if trainer.is_global_zero else None
        if self._optimizer is not None:
            n_steps = self._last - self._first + 1
            self._recording = self._optimizer.tracer.record(skip=self._first - 1, steps=n_steps, aligned=True)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._recording is not None and self._recording.complete:
            self._write()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recording is not None:
            self._write()
        self._optimizer = None

    def _write(self) -> None:
        assert self._recording is not None and self._optimizer is not None
        steps = [step for step in self._recording.steps if step.complete]
        self._recording = None
        if not steps:
            _log.warning("ZenFlow: timeline=%r: training ended before step %d", str(self._path), self._first)
            return
        worker = f"worker on cores {self._optimizer.worker_cores}"
        try:
            write_trace(chrome_trace(steps, worker=worker), self._path)
        except OSError as error:
            # No reason to end a training.
            _log.warning("ZenFlow: timeline=%r cannot be written: %s", str(self._path), error)
            return
        rank_zero_info(f"ZenFlow: timeline of steps {steps[0].step} to {steps[-1].step} in {self._path}")
