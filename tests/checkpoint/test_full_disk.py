"""A disk that is full while a checkpoint is saved, a real one: named with what to do, and nothing is lost or left."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from harness import Case, run_here
from processes import ArenaWatch, leaves_no_file_open

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

CASE = Case(topk_ratio=0.3, model="Perceptron", model_options={"widths": [300, 200]}, steps=4)
SIZE = 1_500_000
"""Bytes: enough for one checkpoint and a half."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small disk needs root; test_checkpoint_safety.py limits the size of files instead")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"root may not mount a small disk here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def message(path: Path) -> str:
    return (
        f"checkpoint {re.escape(str(path))} could not be saved: the disk of {path.parent} is full .No space left on device.; delete files"
        " there, or save to another path.*save_top_k.*training can continue"
    )


class SavesTwice(pl.Callback):
    """Saves where there is room, and again where there is none any more."""

    def __init__(self, disk: Path, *, catches: bool) -> None:
        self._disk = disk
        self._catches = catches

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._disk / "first.ckpt")
        elif trainer.global_step == 3 and not self._catches:
            trainer.save_checkpoint(self._disk / "second.ckpt")
        elif trainer.global_step == 3:
            before = self._bytes(trainer)
            with leaves_no_file_open():
                for name in ("second.ckpt", "first.ckpt"):
                    with pytest.raises(OSError, match=message(self._disk / name)):
                        trainer.save_checkpoint(self._disk / name)
            assert self._bytes(trainer) == before

    def _bytes(self, trainer: pl.Trainer) -> tuple[int, int]:
        """Used on the disk, and by the arena."""
        arena = ArenaWatch(trainer.strategy)
        used = arena.n_bytes
        arena.close()
        return shutil.disk_usage(self._disk).used, used


def test_training_goes_on_and_the_checkpoint_before_stays(disk: Path) -> None:
    run = run_here(replace(CASE, callbacks=(SavesTwice(disk, catches=True),)))
    assert os.listdir(disk) == ["first.ckpt"]
    # A save flushes, also one that fails.
    resumed = run_here(replace(CASE, checkpoint=str(disk / "first.ckpt"), flush_after=(3,)))
    for a, b in zip(run.master, resumed.master, strict=True):
        assert torch.equal(a, b)


def test_an_error_that_is_not_caught_ends_training(disk: Path) -> None:
    with pytest.raises(OSError, match=message(disk / "second.ckpt")):
        run_here(replace(CASE, callbacks=(SavesTwice(disk, catches=False),)))
    assert os.listdir(disk) == ["first.ckpt"]
