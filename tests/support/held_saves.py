"""An entry of a checkpoint that is pickled when a test says so: the save in the background stays under way until then."""

import threading
from collections import OrderedDict
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

_TIMEOUT_S = 120


class Gate:
    """Holds whoever pickles it until it is open, and may then fail him; a deep copy of it is the gate itself."""

    opened = threading.Event()
    """Of the one save that is held; other processes have their own."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self.opened.clear()

    def __deepcopy__(self, memo: Any) -> "Gate":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.opened.wait(_TIMEOUT_S)
        if self._error:
            raise ValueError(self._error)
        return OrderedDict, ()


class HeldSave(pl.Callback):
    """Saves after a step, counted from 1, and opens the gate when a later step begins.

    Args:
        path: of the checkpoint.
        step: after which it is saved.
        until: step that begins when the gate opens; None: a test opens it.
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
            checkpoint["gate"] = Gate(self._error if trainer.global_rank in self._failing else "")

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
            Gate.opened.set()
            if self._error:
                # A flush raises it when the thread has ended.
                strategy: Any = trainer.strategy
                wait(strategy._background._under_way)


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
