"""Saves in the background that stay under way until a test says so."""

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from typing_extensions import override

from lightning_zenflow.checkpoint import checkpoints

_TIMEOUT_S = 120

OPENED = threading.Event()
"""Set when the one save that is held may go on; other processes have their own."""


def hold(saves: checkpoints.Checkpoints, error: str = "") -> None:
    """Has the thread write what it is given from now on when `OPENED` is set, or fail then."""
    OPENED.clear()
    saves._thread.submit(_wait, error)


def _wait(error: str) -> None:
    assert OPENED.wait(_TIMEOUT_S)
    if error:
        patch.object(checkpoints, "_open_zipfile_writer", side_effect=ValueError(error)).start()


class HeldSave(pl.Callback):
    """Saves after a step, counted from 1, and lets the thread go on when a later step begins.

    Args:
        path: of the checkpoint.
        step: after which it is saved.
        until: step that begins when the thread goes on; None: a test says so.
        error: with which the save then fails on the ranks in `failing`; empty: it succeeds.
        failing: these ranks.
    """

    def __init__(
        self, path: Path, step: int, *, until: int | None = None, error: str = "", failing: tuple[int, ...] = (0,)
    ) -> None:
        self._path, self._step, self._until, self._error, self._failing = path, step, until, error, failing
        self._before: int | None = None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.global_step == self._step:
            strategy: Any = trainer.strategy
            hold(strategy._checkpoints, self._error if trainer.global_rank in self._failing else "")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)
            # Of the save before, which has ended.
            self._before = _inode(self._path)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self._until:
            assert _inode(self._path) == self._before
            OPENED.set()
            if self._error:
                # A flush raises it when the thread has ended.
                strategy: Any = trainer.strategy
                wait(strategy._checkpoints._under_way)
                patch.stopall()


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
