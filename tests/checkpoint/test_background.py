"""`async_checkpoints`: a save ends before its file is written, with the same content and the same errors."""

import errno
import io
import logging
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from callbacks import After, At, save
from fabric_runs import set_up, train_step
from harness import EVERYTHING, Case, fit, make_trainer, run_here
from held_saves import OPENED, HeldSave, hold
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.checkpoint import files
from lightning_zenflow.checkpoint.checkpoints import Checkpoints
from lightning_zenflow.checkpoint.files import StagedSave
from lightning_zenflow.core.process import new_pages
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.worker.machine import HOST_MEMORY
from models import LinearLossModule
from networks import SmallNet
from processes import open_files
from rank_processes import run_on_ranks, status_of_fork
from same_bits import assert_same_state, assert_same_tensors
from side_by_side import LATE

CASE = Case(topk_ratio=0.3, strategy_options=EVERYTHING)


strategy = partial(ZenFlowStrategy, **LATE, async_checkpoints=True)


def cases(folder: Path, name: str, case: Case) -> dict[str, Case]:
    """A run with a save that is held for three steps, what resumes from it, and a run with an ordinary save."""
    held = folder / f"{name}, held.ckpt"
    # Whose memory the next one uses again.
    first = saves(folder / f"{name}, first.ckpt", 2)
    saving = replace(case, callbacks=(first, HeldSave(held, 3, until=6))).with_keys(async_checkpoints=True)
    return {
        f"{name}, held": saving,
        f"{name}, ordinary": replace(case, callbacks=(first,), save_at=3, checkpoint=str(folder / f"{name}.ckpt")),
        f"{name}, resumed": replace(case, checkpoint=str(held)),
    }


def assert_same_runs(runs: dict[str, Any], name: str) -> None:
    for other in ("held", "resumed"):
        assert_same_state(runs[f"{name}, {other}"], runs[f"{name}, ordinary"])
        assert_same_tensors(runs[f"{name}, {other}"].weights, runs[f"{name}, ordinary"].weights)


@pytest.mark.parametrize(
    ("format_", "stage", "keys"),
    [
        ("lightning", 2, {}),
        ("lightning", 3, {"moments_dtype": "int8"}),
        ("deepspeed", 2, {"moments_dtype": "bfloat16"}),
        ("deepspeed", 2, {"moments_dtype": "int8"}),
        ("deepspeed", 3, {}),
    ],
)
def test_the_checkpoint_has_the_state_of_its_step(format_: str, stage: Any, keys: Any, tmp_path: Path) -> None:
    """Training that goes on while the file is written changes nothing in it, and is the training with an ordinary save."""
    case = replace(CASE, stage=stage).with_keys(checkpoint_format=format_, **keys)
    assert_same_runs({name: run_here(c) for name, c in cases(tmp_path, "a", case).items()}, "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a, first.ckpt", "a, held.ckpt", "a.ckpt"]


@pytest.mark.parametrize("name", ["folder", pytest.param("file", marks=pytest.mark.slow)])
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    """An error of one rank's thread is an error of both, and leaves nothing."""
    case = CASE if name == "folder" else replace(CASE, stage=3).with_keys(checkpoint_format="lightning")
    removes = partial(cannot_remove, tmp_path)
    failing = replace(
        CASE.with_keys(async_checkpoints=True),
        # Of which each rank's file has the entries of callbacks.
        stage=3,
        callbacks=(
            HeldSave(tmp_path / "failed.ckpt", 3, until=6, error="too late", failing=(1,)),
            After([7], raises),
            After([7], removes),
        ),
    )
    runs = run_on_ranks({**({"failing": failing} if name == "folder" else {}), **cases(tmp_path, name, case)})
    for rank in range(2):
        assert_same_runs({of: of_ranks[rank] for of, of_ranks in runs.items()}, name)
    assert not list(tmp_path.glob("*failed*")) and not list(tmp_path.glob(".*"))


def raises(trainer: Any) -> None:
    """The error of the save before."""
    with pytest.raises(OSError, match=r"failed\.ckpt could not be saved: too late; training can continue"):
        trainer.strategy.wait_for_checkpoint()


def saves(path: Path, step: int) -> After:
    return After([step], partial(save, path))


@pytest.mark.parametrize("raised_at", ["save", "flush", "end"])
def test_an_error_of_the_thread_is_raised(raised_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the path, where the user next asks; and logged at once. The checkpoint before stays."""
    path = tmp_path / "a.ckpt"
    callbacks = [
        saves(path, 1),
        HeldSave(path, 2, until=4, error="late"),
        *([saves(tmp_path / "b.ckpt", 5)] if raised_at == "save" else []),
    ]
    options = {"limit_val_batches": 1, "val_check_interval": 6} if raised_at == "flush" else {}
    trainer = make_trainer(strategy(), max_steps=8, callbacks=callbacks, num_sanity_val_steps=0, **options)
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match=rf"{path} could not be saved: late"):
        trainer.fit(LinearLossModule(length=8))
    assert trainer.global_step == {"save": 5, "flush": 6, "end": 8}[raised_at]
    assert f"checkpoint {path} could not be saved: late" in caplog.text
    # The one behind it is made.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", *(["b.ckpt"] if raised_at == "save" else [])]
    fit(LinearLossModule(length=8), strategy(), steps=8, resume=path)


def test_what_model_checkpoint_removes_stays_until_its_successor_is_complete(tmp_path: Path) -> None:
    """A failed save removes nothing; the one behind it is made before its error is raised."""
    seen: list[list[str]] = []

    looks = At("on_train_batch_start", lambda _: seen.append(sorted(p.name for p in tmp_path.glob("[!.]*"))))
    for error in ("", "late"):
        seen.clear()
        files = ModelCheckpoint(dirpath=tmp_path, filename=f"{{step}}{error}", every_n_train_steps=2)
        held = HeldSave(tmp_path / "other.ckpt", 4, until=6, error=error)
        held.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]  # ModelCheckpoint saves
        callbacks = [files, held, looks]
        with pytest.raises(OSError, match="late") if error else nullcontext():
            fit(LinearLossModule(length=7), strategy(), steps=7, enable_checkpointing=True, callbacks=callbacks)
        assert seen[5] == [f"step=2{error}.ckpt"]
        left = [f"step={step}{error}.ckpt" for step in ((2, 6) if error else (6,))]
        assert sorted(p.name for p in tmp_path.iterdir()) == left
        (tmp_path / left[0]).unlink()


def test_callbacks_of_lightning_and_a_second_fit(tmp_path: Path) -> None:
    """The best and the last checkpoint are complete when `fit` returns, also by an early stop or an exception."""
    model = SmallNet(length=4)
    files = ModelCheckpoint(dirpath=tmp_path, monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=1)
    stop = EarlyStopping("loss", patience=1, mode="max", check_on_train_epoch_end=True)
    trainer = make_trainer(strategy(), max_epochs=3, enable_checkpointing=True, callbacks=[files, stop, LOGS])
    for epochs in (3, 4):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model)
        assert len(list(tmp_path.glob("*.ckpt"))) == 3
        for path in tmp_path.glob("*.ckpt"):
            assert torch.load(path, weights_only=True)["optimizer_states"]
    trainer.limit_test_batches = 1
    trainer.test(model, ckpt_path="best", verbose=False)
    assert not list(tmp_path.glob(".*"))


LOGS = At("on_train_batch_end", lambda t: t.lightning_module.log("loss", float(t.global_step % 5)))
"""Logs a loss that grows and falls."""


def test_saves_that_must_be_complete_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the memory for a copy is missing, and what SLURM ends the job behind."""
    exists: list[bool] = []

    def saves(trainer: pl.Trainer) -> None:
        if trainer.global_step == 2:
            monkeypatch.setenv(HOST_MEMORY, "1e-6")
        path = tmp_path / ("a.ckpt" if trainer.global_step == 2 else "hpc_ckpt_1.ckpt")
        trainer.save_checkpoint(path)
        exists.append(any(tmp_path.glob("*zenflow-saving/file")) or path.exists())
        monkeypatch.delenv(HOST_MEMORY, raising=False)

    with caplog.at_level(logging.WARNING):
        fit(LinearLossModule(length=2), strategy(), steps=2, callbacks=[After([1, 2], saves)])
    assert exists == [True, True]
    assert "a copy of what a file has needs 0.00 GiB of host memory for 1 rank(s), but 0.00 GiB are" in caplog.text


def write(archive: Any, path: Path) -> None:
    archive.write(partial(path.open, "wb"))


def places(memory: dict[int, list[Tensor]]) -> set[int]:
    return {pages.data_ptr() for of_size in memory.values() for pages in of_size}


def users_objects(number: int) -> dict[str, Any]:
    """Of each kind whose memory torch writes in a way of its own."""
    matrix = torch.arange(6, dtype=torch.float32).view(2, 3) + number
    return {
        "shared": (matrix, matrix[1], matrix.T, matrix[:, ::2], matrix.detach().requires_grad_()),
        "parameter": torch.nn.Parameter(matrix + 1),
        "in an object": torch.nn.Linear(2, 3).requires_grad_(False).apply(lambda m: m.weight.fill_(number)),
        "sparse": (matrix.to_sparse(), matrix.to_sparse_csr()),
        "others": (matrix.bfloat16(), matrix > 2, torch.empty(0), torch.empty(3, device="meta"), matrix.numpy()),
        "storage": (matrix + 3).untyped_storage(),
    }


@pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage)")
@pytest.mark.parametrize("checksums", [True, False])
def test_the_file_is_that_of_torch_save(checksums: bool, tmp_path: Path) -> None:
    """At the call, to the byte, whatever is done meanwhile to what was saved; in the memory of the save before."""
    fabric, _, _, _ = set_up(SmallNet(), **LATE, async_checkpoints=True)
    saves: Any = fabric.strategy._checkpoints
    torch.serialization.set_crc32_options(checksums)
    try:
        for number in range(1, 5):
            torch.manual_seed(number)
            content, expected, path = users_objects(number), io.BytesIO(), tmp_path / f"{number}"
            torch.save(content, expected)
            kept = places(saves._before)
            archive = saves.copied(content, DiskCopies(tmp_path))
            # A second file of the save, where temporaries of the first are gone.
            second = saves.copied([torch.full((6,), number)], DiskCopies(tmp_path))
            assert number == 1 or places(saves._present) == kept
            content["shared"][0].fill_(-1)
            content["parameter"].data.fill_(-1)
            hold(saves)
            saves._start(saves._thread, partial(write, archive, path))
            OPENED.set()
            saves.wait()
            assert path.read_bytes() == expected.getvalue()
            write(second, path)
            assert torch.load(path)[0].tolist() == [number] * 6
    finally:
        torch.serialization.set_crc32_options(True)
        fabric.strategy.teardown()


@pytest.mark.parametrize("format_", ["lightning", "deepspeed"])
def test_a_checkpoint_goes_where_it_was_meant_to(format_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the process is in another folder when it is written, and the one before is removed. A load waits for it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fabric, model, optimizer, _ = set_up(SmallNet(), **LATE, async_checkpoints=True, checkpoint_format=format_)
    train_step(fabric, model, optimizer, 0)
    hold(fabric.strategy._checkpoints)
    fabric.save("fabric.ckpt", state := {"model": model, "optimizer": optimizer})
    saved = {name: w.clone() for name, w in model.state_dict().items()}
    train_step(fabric, model, optimizer, 1)
    monkeypatch.chdir("elsewhere")
    assert not (tmp_path / "fabric.ckpt").exists()
    OPENED.set()
    fabric.load(tmp_path / "fabric.ckpt", state)
    torch.testing.assert_close(dict(model.state_dict()), saved, rtol=0, atol=0)
    fabric.strategy.teardown()
    monkeypatch.chdir(tmp_path)

    def removes(trainer: pl.Trainer) -> None:
        trainer.strategy.remove_checkpoint("first.ckpt")
        monkeypatch.chdir("elsewhere")

    held, then = HeldSave(Path("second.ckpt"), 2), After([3], lambda _: OPENED.set())
    own = ZenFlowStrategy(**LATE, async_checkpoints=True, checkpoint_format=format_)
    fit(LinearLossModule(length=4), own, callbacks=[saves(Path("first.ckpt"), 1), held, After([2], removes), then])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "fabric.ckpt", "second.ckpt"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_children_inherit_neither_copies_nor_files(tmp_path: Path) -> None:
    """They would keep memory of each save, and the space of files that are deleted."""
    memory, staged = new_pages(2**20), StagedSave(tmp_path / "a.ckpt", sync=False, is_file=True)
    memory.fill_(1)

    def child() -> None:
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        assert not any(begin <= memory.data_ptr() < end for begin, end in ranges)
        assert not any("zenflow" in name for _, name in open_files())

    with open(staged.content, "wb") as file:
        file.write(b"first")
        # Not by `multiprocessing`, whose children end threads that they do not have.
        if not (forked := os.fork()):
            try:
                child()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(forked, 0)
        file.write(b", then")
    assert status == 0 and staged.content.read_bytes() == b"first, then"
    staged.abandon()


def cannot_remove(folder: Path, trainer: Any) -> None:
    """At once, and behind a save, which is made."""
    discard, path = files._discard, folder / "other.ckpt"

    def refuses(discarded: Path, checkpoint: Path) -> None:
        if discarded == path:
            raise PermissionError(errno.EACCES, "denied", str(path))
        discard(discarded, checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_discard", refuses)
        for saved in ([], ["saved.ckpt"]):
            for name in saved:
                trainer.save_checkpoint(folder / name)
            with pytest.raises(OSError, match=rf"checkpoint {path} could not be removed: .*denied"):
                trainer.strategy.remove_checkpoint(path)
                trainer.strategy.wait_for_checkpoint()
        assert (folder / "saved.ckpt").exists()


@pytest.mark.parametrize("kind", ["link", "default", "again", "similar", "by time"])
def test_callbacks_that_look_for_files(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: list[dict[str, Any]] = {
        "link": [{"save_last": "link"}],
        "default": [{"filename": "{epoch}-{step:d}"}, {"monitor": "loss"}],
        "again": [{"monitor": "loss", "save_top_k": -1, "filename": "{epoch}"}],
        "similar": [{"monitor": "loss", "save_top_k": -1, "filename": "{step_loss:.0f}"}],
        "by time": [{"save_top_k": -1, "every_n_train_steps": None}],
    }[kind]
    interval = timedelta(hours=1) if kind == "by time" else 1.0
    files = [ModelCheckpoint(dirpath=tmp_path, **{"every_n_train_steps": 1, **given}) for given in options]
    saving = {"enable_checkpointing": True, "callbacks": [*files, LOGS], "val_check_interval": interval}
    with caplog.at_level(logging.INFO):
        fit(LinearLossModule(length=3), strategy(), **saving)
    assert ("async_checkpoints has no effect" in caplog.text) == (kind != "by time")
    left = {
        "link": {"epoch=0-step=3.ckpt", "last.ckpt"},
        "default": {"epoch=0-step=3.ckpt", "epoch=0-step=1-v1.ckpt"},
        "again": {"epoch=0.ckpt", "epoch=0-v1.ckpt", "epoch=0-v2.ckpt"},
        "similar": {"step_loss=0.ckpt", "step_loss=0-v1.ckpt", "step_loss=0-v2.ckpt"},
        "by time": set(),  # in an hour
    }
    assert {p.name for p in tmp_path.iterdir()} == left[kind]


def test_an_exception_in_training_leaves_the_save_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def fails(trainer: pl.Trainer) -> None:
        OPENED.set()
        raise KeyError("a user's error")

    with pytest.raises(KeyError, match="a user's error"):
        fit(LinearLossModule(length=6), strategy(), steps=6, callbacks=[HeldSave(path, 2), After([4], fails)])
    assert torch.load(path, weights_only=True)["global_step"] == 2


def end_with_a_save(path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saves: Any = Checkpoints(config := ZenFlowConfig(async_checkpoints=True))
    saves.begin(SimpleNamespace(zenflow=config), SimpleNamespace(num_processes=1, _timeout=None))
    saves._start(saves._thread, lambda: [time.sleep(0.5), path.touch()])


def test_a_program_that_ends_waits_for_the_file(tmp_path: Path) -> None:
    """As under Fabric without `teardown`."""
    assert status_of_fork(end_with_a_save, tmp_path / "written") == 0
    assert (tmp_path / "written").exists()
