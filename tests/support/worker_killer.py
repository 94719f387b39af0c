"""A worker that is killed in every step of a training, or whose answers are seen when a test says so."""

import os
import random
import signal
import time

import lightning.pytorch as pl
from typing_extensions import Any, override

from harness import optimizer_of
from lightning_zenflow.worker.process import Submission, SupervisedWorker


def seen(worker: SupervisedWorker, submission: Submission, is_answered: bool) -> bool:
    """In the place of `SupervisedWorker.has_answered`: what it answers; waits for the worker where it is to be done."""
    if is_answered:
        worker.wait_for(submission)
    return is_answered


class KillsWorker(pl.Callback):
    """Kills the worker once a step, at a random instant (of `seed`) within 2 ms after the step has handed its jobs over or before that."""

    def __init__(self, *, seed: int) -> None:
        self._random = random.Random(seed)
        self.restarts = 0

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._random.random() < 0.2:
            self._kill(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self._random.uniform(0, 0.002))
        self._kill(trainer)

    @override
    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        # Early jobs are on their way.
        if self._random.random() < 0.5:
            self._kill(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.restarts = optimizer_of(trainer).training.telemetry.counts.worker_restarts

    def _kill(self, trainer: pl.Trainer) -> None:
        worker = optimizer_of(trainer).training.parts.rank.worker
        assert worker is not None
        os.kill(worker.current.pid, signal.SIGKILL)
