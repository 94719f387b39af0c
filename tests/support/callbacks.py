"""Callbacks that do something at one of Lightning's hooks. Other processes can have them, where what they do is a module's function."""

from collections.abc import Callable, Sequence
from functools import partial

import lightning.pytorch as pl
from typing_extensions import Any, override

Act = Callable[[pl.Trainer], object]


class At(pl.Callback):
    """Calls a function with the Trainer at one of Lightning's hooks."""

    def __init__(self, hook: str, act: Act) -> None:
        setattr(self, hook, partial(_call, act))


def _call(act: Act, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
    act(trainer)


class After(pl.Callback):
    """Does something after some steps of each training, once each."""

    def __init__(self, steps: Sequence[int], act: Act) -> None:
        self._steps, self._act = steps, act
        self._left: set[int] = set()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left = set(self._steps)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self._left:
            self._left.remove(trainer.global_step)
            self._act(trainer)


def save(path: Any, trainer: pl.Trainer, **options: Any) -> None:
    """Saves a checkpoint; with `partial`, an act."""
    trainer.save_checkpoint(path, **options)
