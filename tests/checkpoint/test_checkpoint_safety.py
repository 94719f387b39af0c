"""A save that fails or is killed changes nothing, on any rank, and a damaged file is refused on all."""

import errno
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed.runtime.engine as engine_module
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from callbacks import After, At
from checkpoint_files import MODEL_FILE, RANK_FILE, change_byte
from harness import Case, run_here
from lightning_zenflow.checkpoint import checkpoints
from lightning_zenflow.core.process import in_common
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.worker.process import WorkerError
from processes import leaves_no_file_open, open_files
from rank_processes import run_on_ranks
from same_bits import assert_same_state, assert_same_tensors

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


def save_on_full_disks(folder: Path, ranks: tuple[int, ...], trainer: pl.Trainer) -> None:
    """Saves ``full.ckpt`` where the disks of some ranks are full, and at once ``elsewhere.ckpt``."""
    before = sorted(folder.rglob("*"))
    limit = full_disk() if trainer.global_rank in ranks else nullcontext()
    message = "full.ckpt could not be saved: .*File too large; training can continue.*ulimit -f.*save to another path"
    with leaves_no_file_open(), limit, pytest.raises(OSError, match=message) as caught:
        trainer.save_checkpoint(folder / "full.ckpt")
    if trainer.global_rank not in ranks:
        assert str(caught.value).startswith(f"rank {ranks[0]}: ")
    if trainer.is_global_zero:
        assert sorted(folder.rglob("*")) == before
    trainer.strategy.barrier()
    trainer.save_checkpoint(folder / "elsewhere.ckpt")


def save_damaged(files: dict[Path, str], trainer: pl.Trainer) -> None:
    """Saves checkpoints; in each of them a byte in the middle of a file then changes."""
    for path, name in files.items():
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            position = (path / name).stat().st_size // 2
            change_byte(path / name, position, (path / name).read_bytes()[position] ^ 1)
    trainer.strategy.barrier()


def fail_in_saves(folder: Path, trainer: pl.Trainer) -> None:
    """Rank 1 fails in a save, before or after what DeepSpeed does in it, which has another barrier of its own; then a save succeeds."""
    engine_class, broadcast = type(trainer.strategy.deepspeed_engine), dist.broadcast_object_list
    save = engine_class.save_checkpoint

    def elsewhere(contents: list[Any], *args: Any, **options: Any) -> None:
        """What rank 0 has made is not on the disk of rank 1."""
        broadcast(contents, *args, **options)
        if trainer.global_rank == 1 and "zenflow-saving" in str(contents[0]):
            contents[0] = contents[0].parent / "elsewhere"

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
            trainer.save_checkpoint(folder / "failed.ckpt")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match=r"all nodes must share the storage"):
        patch.setattr(checkpoints.dist, "broadcast_object_list", elsewhere)
        trainer.save_checkpoint(folder / "failed.ckpt")
    trainer.save_checkpoint(folder / "saved.ckpt")


def save_in_different_steps(path: Path, trainer: pl.Trainer) -> None:
    """As after an exception that has interrupted rank 1 a step later than rank 0."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(WorkerError, match="ranks in different steps"):
        # What the ranks agree on: the step would also decide whether a rank flushes, which all do together.
        patch.setattr(checkpoints, "in_common", lambda numbers: in_common([numbers[0] + trainer.global_rank]))
        trainer.save_checkpoint(path)
    assert not path.exists()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """Neither training nor the checkpoint before."""
    undisturbed = run_here(replace(CASE, save_at=2, checkpoint=str(tmp_path / "full.ckpt"), flush_after=(3,)))
    saves = After([3], partial(save_on_full_disks, tmp_path, (0,)))
    run = run_here(replace(CASE, callbacks=(saves,), flush_after=(2,)))
    resumed = run_here(replace(CASE, checkpoint=str(tmp_path / "elsewhere.ckpt")))
    for other in (run, resumed):
        assert_same_state(other, undisturbed)
        assert_same_tensors(other.weights, undisturbed.weights)
    assert torch.load(tmp_path / "full.ckpt" / MODEL_FILE, weights_only=False)["global_step"] == 2


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_one_of_two_ranks_has_a_full_disk_or_a_damaged_file(stage: Any, tmp_path: Path) -> None:
    case = replace(CASE, stage=stage)
    if stage == 3:
        # With parameters that stay gathered.
        zero = {**case.zero_3(), "stage3_param_persistence_threshold": 250}
        case = case.with_keys(config={"zero_optimization": zero})
    damaged = {
        tmp_path / "model.ckpt": MODEL_FILE if stage == 2 else RANK_FILE.replace("optim", "model"),
        tmp_path / "rank 0.ckpt": RANK_FILE,
        tmp_path / "rank 1.ckpt": RANK_FILE.replace("pp_rank_0", "pp_rank_1"),
    }
    saves = (
        After([3], partial(save_on_full_disks, tmp_path, (1,))),
        After([3], partial(save_in_different_steps, tmp_path / "no.ckpt")),
        After([3], partial(fail_in_saves, tmp_path)),
        At("on_train_end", partial(save_damaged, damaged)),
    )
    cases = {"saving": replace(case, callbacks=saves)}
    cases |= {path.stem: replace(case, checkpoint=str(path), fails=True) for path in damaged}
    cases["saved"] = replace(case, checkpoint=str(tmp_path / "saved.ckpt"))
    runs = run_on_ranks(cases)
    for path, file in damaged.items():
        for run in runs[path.stem]:
            assert run.error is not None, file
            assert f"checkpoint {path}/{file}: this file is truncated or damaged (BadZipFile" in run.error
            assert "CheckpointError" in run.error
    assert_same_tensors(runs["saved"][0].master, runs["saving"][0].master)
    assert not (tmp_path / "failed.ckpt").exists()


def test_who_has_another_problem_is_not_told_to_delete_files(tmp_path: Path) -> None:
    def refused(trainer: pl.Trainer) -> None:
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO, errno.ENAMETOOLONG):
            error = OSError(code, os.strerror(code), "file")
            commits = patch.object(checkpoints.StagedSave, "commit", side_effect=error)
            with commits, pytest.raises(OSError, match=rf"a\.ckpt could not .*{error.strerror}") as caught:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            assert ("Delete files there" in str(caught.value)) == (code in (errno.ENOSPC, errno.EDQUOT))

    run_here(replace(CASE, steps=1, callbacks=(After([1], refused),)).with_keys(checkpoint_format="lightning"))


@pytest.mark.parametrize(("stage", "sync"), [(2, False), (3, True)])
def test_each_rank_syncs_its_own_files(stage: int, sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(checkpoints, "sync_all", lambda paths: synced.extend(path.name for path in paths))
    case = Case(steps=2, save_at=2, checkpoint=str(tmp_path / "a.ckpt"), stage=stage)
    run_here(case.with_keys(sync_checkpoints=sync))
    of_optimizer = Path(RANK_FILE).name
    assert {*synced} == (
        {of_optimizer, *([of_optimizer.replace("optim", "model")] if stage == 3 else [])} if sync else set()
    )


@pytest.mark.parametrize("checkpoint_format", ["lightning", "deepspeed"])
def test_a_failed_save_leaves_no_space_taken(
    checkpoint_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted files that are mapped take space on the disk; here it fails behind the copy of the states, and its error is kept. Network
    storage gives such a file a name, which must not be one of the checkpoint's, but beside it.
    """
    errors, blocks, folders = list[OSError](), list[int](), list[Path]()
    monkeypatch.setattr(checkpoints, "DiskCopies", lambda folder: (folders.append(folder), DiskCopies(folder))[1])

    def saves(trainer: pl.Trainer) -> None:
        gc.disable()
        try:
            with pytest.raises(OSError, match="local object") as error:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            errors.append(error.value)
            # A mapping has a descriptor of its own.
            blocks.extend(os.fstat(fd).st_blocks for fd, name in open_files() if str(tmp_path) in name)
        finally:
            gc.enable()

    spoils = LambdaCallback(on_save_checkpoint=lambda trainer, module, saved: saved.update(unpickled=lambda: None))
    case = replace(CASE, steps=2, callbacks=(spoils, After([1, 2], saves)))
    run_here(case.with_keys(checkpoint_format=checkpoint_format, moments_dtype="int8"))
    assert len(errors) == 2 and not any(blocks) and folders == [tmp_path] * 2
    assert [*tmp_path.iterdir()] == []
