"""A save that fails changes nothing, on any rank, and a damaged file is refused on all."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine as engine_module
import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from checkpoint_files import MODEL_FILE, RANK_FILE, change_byte
from harness import Case, run_here
from lightning_zenflow.checkpoint import collective
from lightning_zenflow.step.step import ZenFlowStep
from lightning_zenflow.worker.process import WorkerError
from rank_processes import run_on_ranks
from same_bits import assert_same_tensors

CASE = Case(topk_ratio=0.3, model="Perceptron", model_options={"widths": [300, 200]}, steps=8)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond what log lines need: writing fails as on a full disk, and needs no rights of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class SaveOnFullDisk(pl.Callback):
    """Saves after a step where the disk is full, for some ranks or all, and at once elsewhere, where it is not.

    Args:
        folder: of both checkpoints; ``full.ckpt`` is there already, or not.
        step: counted from 1.
        ranks: whose disks are full.
    """

    def __init__(self, folder: Path, step: int, ranks: tuple[int, ...] = (0,)) -> None:
        self._folder = folder
        self._step = step
        self._ranks = ranks

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:
            return
        full, elsewhere = self._folder / "full.ckpt", self._folder / "elsewhere.ckpt"
        before = sorted(self._folder.rglob("*"))
        with pytest.raises(OSError, match="full.ckpt could not be saved: .*training can continue") as caught:
            if trainer.global_rank in self._ranks:
                with full_disk():
                    trainer.save_checkpoint(full)
            else:
                trainer.save_checkpoint(full)
        if trainer.global_rank not in self._ranks:
            assert str(caught.value).startswith(f"rank {self._ranks[0]}: ")
        if trainer.is_global_zero:
            assert sorted(self._folder.rglob("*")) == before
        trainer.strategy.barrier()
        trainer.save_checkpoint(elsewhere)


class SaveDamaged(pl.Callback):
    """Saves checkpoints after training; in each of them a byte in the middle of a file then changes.

    Args:
        files: of checkpoints, by the checkpoint's path.
    """

    def __init__(self, files: dict[Path, str]) -> None:
        self._files = files

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for path, name in self._files.items():
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                position = (path / name).stat().st_size // 2
                change_byte(path / name, position, (path / name).read_bytes()[position] ^ 1)
        trainer.strategy.barrier()


class FailingSaves(pl.Callback):
    """Rank 1 fails in a save, before or after what DeepSpeed does in it, which has another barrier of its own; then a save succeeds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != 3:
            return
        engine_class = type(trainer.strategy.deepspeed_engine)
        save = engine_class.save_checkpoint
        for when in ("before", "after"):

            def failing(engine: Any, *arguments: Any, when: str = when, **options: Any) -> None:
                fails = trainer.global_rank == 1
                if when == "before" and fails:
                    raise KeyError("before")
                save(engine, *arguments, **options)
                engine_module.dist.barrier()
                if when == "after" and fails:
                    raise KeyError("after")

            with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match=f"failed.ckpt could not .*{when}"):
                patch.setattr(engine_class, "save_checkpoint", failing)
                trainer.save_checkpoint(self._folder / "failed.ckpt")
        trainer.save_checkpoint(self._folder / "saved.ckpt")


class SaveInDifferentSteps(pl.Callback):
    """A save after an exception that has interrupted rank 1 a step later than rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            number = property(lambda _: 3 + trainer.global_rank)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(WorkerError, match="ranks in different steps"):
                patch.setattr(ZenFlowStep, "number", number)
                trainer.save_checkpoint(self._path)
            assert not self._path.exists()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    undisturbed = run_here(replace(CASE, save_at=3, checkpoint=str(tmp_path / "undisturbed.ckpt")))
    run = run_here(replace(CASE, callbacks=(SaveOnFullDisk(tmp_path, 3),)))
    resumed = run_here(replace(CASE, checkpoint=str(tmp_path / "elsewhere.ckpt")))
    for kind in ("master", "exp_avg", "exp_avg_sq", "weights"):
        for a, b, c in zip(*(getattr(r, kind) for r in (undisturbed, run, resumed)), strict=True):
            assert torch.equal(a, b) and torch.equal(a, c), kind


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run_here(replace(CASE, steps=2, save_at=2, checkpoint=str(tmp_path / "full.ckpt")))
    run_here(replace(CASE, steps=4, callbacks=(SaveOnFullDisk(tmp_path, 3),)))
    assert (
        torch.load(tmp_path / "full.ckpt/checkpoint/mp_rank_00_model_states.pt", weights_only=False)["global_step"] == 2
    )


class SaveUnderAFile(pl.Callback):
    """Saves where there can be no folder."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        with pytest.raises(OSError, match=f"checkpoint {self._file}/a.ckpt could not be saved: .*Not a directory"):
            trainer.save_checkpoint(self._file / "a.ckpt")


def test_where_there_can_be_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = run_here(replace(CASE, steps=2, callbacks=(SaveUnderAFile(tmp_path / "file"),)))
    assert len(run.losses) == 2


def test_one_of_two_ranks_has_a_full_disk_or_a_damaged_file(tmp_path: Path) -> None:
    damaged = {
        tmp_path / "model.ckpt": MODEL_FILE,
        tmp_path / "rank 0.ckpt": RANK_FILE,
        tmp_path / "rank 1.ckpt": RANK_FILE.replace("pp_rank_0", "pp_rank_1"),
    }
    saves = (
        SaveOnFullDisk(tmp_path, 3, ranks=(1,)),
        SaveInDifferentSteps(tmp_path / "no.ckpt"),
        FailingSaves(tmp_path),
        SaveDamaged(damaged),
    )
    cases = {"saving": replace(CASE, callbacks=saves)}
    cases |= {path.stem: replace(CASE, checkpoint=str(path), fails=True) for path in damaged}
    cases["saved"] = replace(CASE, checkpoint=str(tmp_path / "saved.ckpt"))
    runs = run_on_ranks(cases)
    for path, file in damaged.items():
        for run in runs[path.stem]:
            assert run.error is not None, file
            assert f"checkpoint {path}/{file}: this file is truncated or damaged (BadZipFile" in run.error
            assert "CheckpointError" in run.error
    assert_same_tensors(runs["saved"][0].master, runs["saving"][0].master)
    assert not (tmp_path / "failed.ckpt").exists()


@pytest.mark.parametrize("sync", [True, False])
def test_each_rank_syncs_its_own_file(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(collective, "sync_all", lambda paths: synced.extend(path.name for path in paths))
    run_here(Case(steps=2, save_at=2, checkpoint=str(tmp_path / "a.ckpt")).with_keys(sync_checkpoints=sync))
    assert synced == ([Path(RANK_FILE).name] if sync else [])
