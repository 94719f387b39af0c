"""A save that fails changes nothing, and what is no checkpoint of this model is refused by name."""

import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine as engine_module
import lightning.pytorch as pl
import pytest
import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from harness import Case, make_trainer, run_here
from lightning_zenflow.checkpoint import atomic
from lightning_zenflow.checkpoint.atomic import StagedSave, recover, remove
from lightning_zenflow.checkpoint.reader import CheckpointError, SavedCheckpoint
from models import LinearLossModule
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


def change_byte(file: Path, position: int, to: int) -> None:
    """Changes a single byte of a file."""
    with file.open("r+b") as stream:
        stream.seek(position)
        stream.write(bytes([to]))


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
    saves = (SaveOnFullDisk(tmp_path, 3, ranks=(1,)), FailingSaves(tmp_path), SaveDamaged(damaged))
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


def save(path: Path, content: str) -> None:
    staged = StagedSave(path, sync=True)
    (staged.folder / "content").write_text(content)
    staged.commit()


def killed_at(owner: Any, function: str, call: int, path: Path) -> None:
    """Saves in another process, which is killed when it calls a function for the n-th time, counted from 1."""
    pid = os.fork()
    if pid == 0:
        original, calls = getattr(owner, function), []

        def killing(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, function, killing)
        try:
            save(path, "killed")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def can_exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can exchange two names."""
    if not request.param:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    return bool(request.param)


def test_a_checkpoint_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, "first")
    seen, stop = set(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.add(path.exists())

    thread = threading.Thread(target=look)
    thread.start()
    for i in range(200):
        save(path, str(i))
    stop.set()
    thread.join()
    assert (path / "content").read_text() == "199"
    assert seen == {True}
    assert os.listdir(tmp_path) == ["a.ckpt"]
    remove(path)
    assert os.listdir(tmp_path) == []
    remove(path)


@pytest.mark.parametrize("name", ["a.ckpt", "a", "ä" * 127, "a." + "b" * 250, "a" * 250 + ".ckpt", "." + "c" * 254])
@pytest.mark.usefixtures("can_exchange")
def test_names_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for content in ("first", "second"):
        save(path, content)
    assert (path / "content").read_text() == "second"
    assert os.listdir(tmp_path) == [name]
    killed_at(shutil, "rmtree", 1, path)
    save(tmp_path / "other.ckpt", "")
    assert sorted(os.listdir(tmp_path)) == sorted([name, "other.ckpt"])
    remove(path)
    assert os.listdir(tmp_path) == ["other.ckpt"]


@pytest.mark.usefixtures("can_exchange")
def test_what_killed_saves_leave_goes_with_the_next_save_and_nothing_else(tmp_path: Path) -> None:
    of_the_user = [".notes.removed", ".old.removed", ".a.ckpt.saving", "b.replaced.ckpt", ".lock"]
    for name in of_the_user:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    killed_at(os, "fsync", 1, tmp_path / "epoch=0-val=0.12.ckpt")
    killed_at(Path, "rename", 1, tmp_path / "epoch=1-val=0.11.ckpt")
    save(tmp_path / "b.ckpt", "old")
    killed_at(shutil, "rmtree", 1, tmp_path / "b.ckpt")
    left = set(os.listdir(tmp_path)) - {*of_the_user, "b.ckpt"}
    assert left
    alive = StagedSave(tmp_path / "alive.ckpt", sync=False)
    (alive.folder / "content").write_text("alive")
    assert not left & set(os.listdir(tmp_path))
    # Of another run in the same folder, and of the same name.
    for path in (tmp_path / "c.ckpt", tmp_path / "alive.ckpt"):
        save(path, "other")
    alive.commit()
    assert (tmp_path / "alive.ckpt" / "content").read_text() == "alive"
    assert sorted(os.listdir(tmp_path)) == sorted([*of_the_user, "alive.ckpt", "b.ckpt", "c.ckpt"])
    assert all((tmp_path / name / "precious").exists() for name in of_the_user)


def test_a_save_that_was_killed_between_two_renames_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    for path in (tmp_path / "last.ckpt", tmp_path / ("long" * 60)):
        save(path, "old")
        killed_at(Path, "rename", 2, path)
        assert not path.exists()
        recover(path)
        assert (path / "content").read_text() == "old"
        killed_at(Path, "rename", 2, path)
        assert not path.exists()
        staged = StagedSave(path, sync=False)
        assert (path / "content").read_text() == "old"
        staged.abandon()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "long" * 60]


def test_a_save_goes_on_if_another_process_has_recovered_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    path = tmp_path / "a.ckpt"
    save(path, "old")
    rename, calls = Path.rename, []

    def recovering(source: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            recover(path)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", recovering)
    save(path, "new")
    assert (path / "content").read_text() == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.usefixtures("can_exchange")
def test_all_is_on_the_disk_before_it_has_its_name(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each rename: all files and folders of the checkpoint; before the old one goes: the folder with the new name."""
    synced: set[tuple[int, int]] = set()
    states: list[str] = []
    folder = tmp_path / "new" / "folder"
    fsync, rename, exchange, discard = os.fsync, Path.rename, atomic._exchange, atomic._discard

    def state(path: Path) -> tuple[int, int]:
        return path.stat().st_ino, path.stat().st_mtime_ns

    def note_sync(fd: int) -> None:
        fsync(fd)
        synced.add((os.fstat(fd).st_ino, os.fstat(fd).st_mtime_ns))

    def note_name(staged: Path, path: Path) -> None:
        if path == folder / "a.ckpt":
            assert sync == all(state(p) in synced for p in (staged, *staged.rglob("*")))
            states.append("named")

    def noting_rename(source: Path, target: Path) -> Path:
        note_name(source, target)
        return rename(source, target)

    def noting_exchange(a: Path, b: Path) -> bool:
        note_name(a, b)
        return exchange(a, b)

    def noting_discard(path: Path) -> None:
        if path.exists():
            assert sync == (state(folder) in synced)
            states.append("deleted")
        discard(path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    monkeypatch.setattr(atomic, "_exchange", noting_exchange)
    monkeypatch.setattr(atomic, "_discard", noting_discard)
    for name in ("first", "second"):
        staged = StagedSave(folder / "a.ckpt", sync=sync)
        if name == "first":
            assert sync == all(state(p) in synced for p in (tmp_path, tmp_path / "new"))
        (staged.folder / "checkpoint").mkdir()
        (staged.folder / "checkpoint" / "states.pt").write_text(name)
        (staged.folder / "latest").write_text("checkpoint")
        staged.commit()
    assert states[0] == states[-2] == "named" and states[-1] == "deleted"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "saved.ckpt"
    run_here(Case(steps=2, save_at=2, checkpoint=str(path)))
    return path


RANK_FILE = "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL_FILE = "checkpoint/mp_rank_00_model_states.pt"


def truncate(name: str, share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, int(share * (path / name).stat().st_size))


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = torch.load(path / name, weights_only=False)
        change(content)
        torch.save(content, path / name)

    return apply


def without_moments(content: dict[str, Any]) -> None:
    del content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg_sq"]


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing there": (shutil.rmtree, "the path must exist"),
    "empty directory": (
        lambda p: (shutil.rmtree(p), p.mkdir()),
        "must be a checkpoint of DeepSpeed, got one without the file `latest`",
    ),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "the path must be a directory .*, got a file"),
    "no folder": (
        lambda p: (p / "latest").write_text("other"),
        "the folder 'other', named by its file `latest`, is missing",
    ),
    "no model": (
        lambda p: (p / MODEL_FILE).unlink(),
        "the file mp_rank_00_model_states.pt is missing: the checkpoint is incomplete",
    ),
    "no rank": (lambda p: (p / RANK_FILE).unlink(), f"the file of rank 0 of 1 is missing: {RANK_FILE}"),
    "stage 3": (
        lambda p: (p / MODEL_FILE).rename(p / "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "the ZeRO stage must be 1 or 2, got 3",
    ),
    "empty model file": (truncate(MODEL_FILE, 0), f"{MODEL_FILE}: this file is truncated or damaged"),
    "half a model file": (truncate(MODEL_FILE, 0.5), f"{MODEL_FILE}: this file is truncated or damaged"),
    "empty rank file": (truncate(RANK_FILE, 0), f"{RANK_FILE}: this file is truncated or damaged"),
    "half a rank file": (truncate(RANK_FILE, 0.5), f"{RANK_FILE}: this file is truncated or damaged"),
    "nearly a rank file": (truncate(RANK_FILE, 0.9999), f"{RANK_FILE}: this file is truncated or damaged"),
    "text": (lambda p: (p / RANK_FILE).write_text("hello world"), f"{RANK_FILE}: this file is truncated or damaged"),
    "another file of torch": (lambda p: torch.save([1], p / MODEL_FILE), "must be a model file of DeepSpeed's engine"),
    "another optimizer": (
        edit(RANK_FILE, without_moments),
        "parameter group 1 must have the complete state of AdamW or Adam, got no exp_avg_sq",
    ),
    "no optimizer": (lambda p: torch.save({"a": 1}, p / RANK_FILE), "must be an optimizer state of ZeRO stage 1 or 2"),
    "another precision": (
        lambda p: (p / RANK_FILE).rename(p / RANK_FILE.replace("zero_", "bf16_zero_")),
        "the precision must be that of the checkpoint, bf16, got another",
    ),
    "a newer layout": (
        edit(RANK_FILE, lambda content: content["optimizer_state_dict"]["zenflow"].update(version=1000)),
        "the layout must be at most 3, got 1000, of a newer version: upgrade lightning-zenflow",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    path = tmp_path / "a.ckpt"
    shutil.copytree(saved, path)
    damage(path)
    with pytest.raises(CheckpointError, match=rf"^checkpoint {path}.*{message}"):
        SavedCheckpoint(path).model_states and SavedCheckpoint(path).optimizer_state(0, bf16=False)


def test_of_an_older_layout_adamws_state_is_used(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.ckpt"
    shutil.copytree(saved, path)
    edit(RANK_FILE, lambda content: content["optimizer_state_dict"]["zenflow"].update(version=1))(path)
    with caplog.at_level(logging.INFO):
        resumed = run_here(Case(steps=4, checkpoint=str(path)))
    assert (
        "an older lightning-zenflow wrote it (its layout is 1, now it is 3): the schedule, the selection of columns"
        in caplog.text
    )
    whole = run_here(Case(steps=4))
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(resumed, kind), getattr(whole, kind), kind)


def check_single_bytes(saved: Path, path: Path, n: int) -> None:
    """Changes single bytes of all files of a checkpoint, one at a time; each time it is what was saved, or refused by the file's name."""

    def read() -> list[Any]:
        checkpoint = SavedCheckpoint(path)
        checkpoint.verify_model()
        checkpoint.verify_optimizer([0], bf16=False)
        states = checkpoint.model_states
        sizes = [flat.numel() for flat in checkpoint.optimizer_state(0, bf16=False)["single_partition_of_fp32_groups"]]
        content = [states, checkpoint.state_for(0, sizes, world_size=1, bf16=False)]
        return [leaf if isinstance(leaf, torch.Tensor) else repr(type(leaf)) for leaf in tree_leaves(content)]

    shutil.copytree(saved, path)
    expected = read()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    rng = random.Random(20261124)
    n_refused = 0
    for file in files:
        original = file.read_bytes()
        for i in range(-(-n // len(files))):
            # Every second position is near an end of the file, where its structure is.
            near = rng.randrange(min(4096, len(original)))
            position = [rng.randrange(len(original)), near, len(original) - 1 - near][i % 3]
            change_byte(file, position, original[position] ^ rng.randrange(1, 256))
            try:
                assert_same_content(read(), expected)
            except CheckpointError as error:
                assert str(error).startswith(f"checkpoint {path}")
                assert file.name in str(error), f"{file.name}, byte {position}: {error}"
                n_refused += 1
            file.write_bytes(original)
    assert n_refused > n / 5


def assert_same_content(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def test_any_single_byte(saved: Path, tmp_path: Path) -> None:
    check_single_bytes(saved, tmp_path / "a.ckpt", 60)


@pytest.mark.slow
def test_two_thousand_single_bytes(saved: Path, tmp_path: Path) -> None:
    check_single_bytes(saved, tmp_path / "a.ckpt", 2000)


@pytest.mark.parametrize("content", ["", "c" * 300, "/", "checkpoint\0", "../..", "\udcff", "checkpoint/"])
def test_nonsense_in_latest(content: str, saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    (path / "latest").write_bytes(content.encode(errors="surrogateescape"))
    try:
        assert SavedCheckpoint(path).model_states
    except CheckpointError as error:
        assert str(error).startswith(f"checkpoint {path}") and len(str(error)) < 400


class Moved:
    """A class that the module of this test has when a checkpoint is saved, and not any more when it is loaded."""


@pytest.mark.parametrize("gone", ["module", "class"])
def test_a_hyperparameter_whose_class_has_moved(
    gone: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    module = types.ModuleType("old_module")
    module.Moved = Moved  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "old_module", module)
        patch.setattr(Moved, "__module__", "old_module")
        edit(MODEL_FILE, lambda content: content.update(hyper_parameters={"a": Moved()}))(path)
    if gone == "class":
        del module.Moved
        monkeypatch.setitem(sys.modules, "old_module", module)
    with pytest.raises(CheckpointError, match=f"^checkpoint {path}/{MODEL_FILE}: .*old_module.*must be importable"):
        run_here(Case(steps=4, checkpoint=str(path)))


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "optimizer, no groups": lambda c: c["optimizer_state_dict"]["base_optimizer_state"].pop("param_groups"),
    "optimizer, a list": lambda c: c["optimizer_state_dict"].update(
        base_optimizer_state={"param_groups": [], "state": []}
    ),
    "optimizer, other sizes": lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
        exp_avg=torch.zeros(3)
    ),
    "optimizer, no stage": lambda c: c["optimizer_state_dict"].pop("zero_stage"),
    "optimizer, layout": lambda c: c["optimizer_state_dict"]["zenflow"].pop("layout"),
    "optimizer, columns": lambda c: c["optimizer_state_dict"]["zenflow"].update(ownership={}),
    "model, ranks": lambda c: c.update(dp_world_size="two"),
    "model, shapes": lambda c: c.update(param_shapes=[None, None]),
    "model, steps": lambda c: c.pop("global_steps"),
    "model, weights": lambda c: c.update(module=None),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("no_worker_is_left")
def test_content_that_is_not_what_it_must_be(name: str, saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    edit(MODEL_FILE if name.startswith("model") else RANK_FILE, WRONG[name])(path)
    assert_refused(Case(steps=4, checkpoint=str(path)), f"^checkpoint {path}")


@pytest.mark.parametrize("part", ["checkpoint", RANK_FILE])
def test_a_part_of_a_checkpoint_is_refused(part: str, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=f"must be a whole checkpoint, got a part: use {saved}$"):
        SavedCheckpoint(saved / part)


def assert_refused(case: Case, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        run_here(case)


@pytest.mark.usefixtures("no_worker_is_left")
def test_another_model_is_refused(saved: Path) -> None:
    here = Case(steps=4, checkpoint=str(saved))
    shapes = {"shapes": ((31, 29), (8, 3, 3, 5), (53, 8), (37,), (3, 211), (1,), (5, 2, 2))}
    assert_refused(
        replace(here, model_options=shapes),
        rf"checkpoint {saved}: the model must be the saved one: parameter group 0 must have weights.2 \[53, 7\], got"
        r" weights.2 \[53, 8\]",
    )
    fewer = {"shapes": ((31, 29), (8, 3, 3, 5), (53, 7), (37,), (3, 211), (1,))}
    assert_refused(
        replace(here, model_options=fewer),
        rf"checkpoint {saved}: parameter group 0 must have 5 parameters, got 4: weights.6 only in the checkpoint",
    )
    assert_refused(
        replace(here, model="OneGroup"),
        "configure_optimizers must return the saved number of parameter groups, 2, got 1",
    )


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("auto", max_steps=1)
    trainer.fit(LinearLossModule())
    trainer.save_checkpoint(tmp_path / "single.ckpt")
    assert_refused(
        Case(steps=4, checkpoint=str(tmp_path / "single.ckpt")),
        f"checkpoint {tmp_path}/single.ckpt: the path must be a directory .*, got a file",
    )
