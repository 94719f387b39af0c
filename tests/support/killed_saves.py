"""Trains with `ModelCheckpoint` in processes that are killed while they save, one after the other, each going on from what is left.

Run as a script, which is a process that has everything imported and forks one child for each run: that takes a fraction of the time.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from harness import make_trainer
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from models import LinearLossModule
from rank_processes import free_port

_EVENTS = ("open", "os.", "shutil.")
"""Of Python's audit hooks: whatever touches the file system."""
KILLED_SAVE = 2
"""Of each process, counted from 1: the one before is progress."""


class WatchSaves(pl.Callback):
    """Kills the process at the n-th event of a save.

    Args:
        folder: where checkpoints are written; events elsewhere are of no interest.
        kill_at: number of the event, counted from 0; None: never.
    """

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.events: list[str] = []
        self._folder = str(folder)
        self._kill_at = kill_at
        self._steps = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        # A save in the background ends with a later step.
        is_over = self._steps > KILLED_SAVE and not IN_BACKGROUND
        if self._steps < KILLED_SAVE or is_over or not event.startswith(_EVENTS):
            return
        # Deleting a folder names what is in it without its path.
        if event in ("os.remove", "os.rmdir") or any(self._folder in str(arg) for arg in args):
            if len(self.events) == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.events.append(event)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        # Comes before that of ModelCheckpoint, which Lightning puts at the end.
        self._steps += 1


FORMAT: Any = sys.argv[3]
"""Of the checkpoints."""
IN_BACKGROUND = len(sys.argv) > 4
"""Whether training goes on while they are written."""


def train(folder: Path, steps: int, kill_at: int | None = None) -> tuple[LinearLossModule, WatchSaves]:
    """Saves after every step, keeping the newest checkpoint and ``last.ckpt``; goes on from the last one."""
    watch = WatchSaves(folder, kill_at)
    checkpoints = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True, save_top_k=1)
    model = LinearLossModule(length=steps)
    strategy = ZenFlowStrategy(
        topk_ratio=0.3,
        update_interval=4,
        publish_lag=1,
        worker_cores=1,
        checkpoint_format=FORMAT,
        async_checkpoints=IN_BACKGROUND,
    )
    trainer = make_trainer(strategy, max_steps=steps, enable_checkpointing=True, callbacks=[checkpoints, watch])
    trainer.fit(model, ckpt_path="last")
    return model, watch


def run_child(function: Callable[..., object], *arguments: Any, exit_code: int = 0) -> None:
    """In a process of its own, which must end well or, with a negative code, by a signal."""
    os.environ["MASTER_PORT"] = str(free_port())
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    try:
        child.join()
    finally:
        child.kill()  # of a test whose time is up
    assert child.exitcode == exit_code


def assert_usable(folder: Path) -> None:
    """Everything that has the name of a checkpoint is a complete one, and there is a last one, perhaps between two renames."""
    assert list(folder.glob("last*.ckpt"))
    for path in folder.iterdir():
        if not path.name.startswith("."):
            if FORMAT == "deepspeed":
                SavedCheckpoint(path).optimizer_state(0)
            else:
                assert torch.load(path, weights_only=True)["optimizer_states"]


def run_killed(folder: Path, steps: int, points: list[float]) -> None:
    """Kills one process after the other, each at one of its second save's events; `points` are 0 to 1, first to last event."""
    log = folder.parent / "events.json"

    def rehearse() -> None:
        log.write_text(json.dumps(train(folder, KILLED_SAVE + 1)[1].events))

    run_child(rehearse)
    events = json.loads(log.read_text())
    print("events of a save:", events)
    for point in points:
        kill_at = round(point * (len(events) - 1))
        run_child(train, folder, steps, kill_at, exit_code=-signal.SIGKILL)
        assert_usable(folder)


def main(folder: Path, points: list[float]) -> None:
    """Runs as said, then to the end, and the same undisturbed; writes the weights of both."""
    torch.set_num_threads(1)
    disturbed, undisturbed = folder / "disturbed", folder / "undisturbed"
    # Of each killed process one step is certain, and no more than three are possible.
    steps = KILLED_SAVE + 3 * len(points) + 2

    def finish(where: Path) -> None:
        torch.save(train(where, steps)[0].state_dict(), f"{where}.pt")

    run_killed(disturbed, steps, points)
    for where in (disturbed, undisturbed):
        run_child(finish, where)
    # Whatever the killed saves left is cleared away by later ones.
    left = sorted(path.name for path in disturbed.iterdir() if path.name.startswith(".") or "zenflow" in path.name)
    assert left == [], left


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
