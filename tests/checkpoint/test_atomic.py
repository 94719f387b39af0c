"""Directories that are complete or absent, whatever is killed or fails: `checkpoint.atomic` without training."""

import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_zenflow.checkpoint import atomic
from lightning_zenflow.checkpoint.atomic import StagedSave, recover, remove, sync_all


def save(path: Path, content: str) -> None:
    staged = StagedSave(path, sync=True)
    (staged.folder / "content").write_text(content)
    staged.commit()


def killed_at(owner: Any, function: str, call: int, path: Path, action: Callable[[Path], None] | None = None) -> None:
    """Saves, or does `action`, in another process, which is killed when it calls a function for the n-th time, counted from 1."""
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
            save(path, "killed") if action is None else action(path)
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


def test_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can tell whether another one is alive, so all leave each other's files alone."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    killed_at(os, "fsync", 1, tmp_path / "a.ckpt")
    left = set(os.listdir(tmp_path))
    alive = StagedSave(tmp_path / "a.ckpt", sync=False)
    save(tmp_path / "b.ckpt", "other")
    alive.commit()
    assert set(os.listdir(tmp_path)) == {*left, "a.ckpt", "b.ckpt"} and len(left) == 2


def test_a_lock_of_a_file_that_has_been_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file of a new save is taken for that of a killed one: the save then takes another file."""
    flock, files = fcntl.flock, []

    def deleting(fd: int, operation: int) -> None:
        if not files:
            files.extend(tmp_path.iterdir())
            files[0].unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", deleting)
    alive = StagedSave(tmp_path / "a.ckpt", sync=False)
    assert len(files) == 1 and not files[0].exists()
    assert len(list(tmp_path.glob(".*.zenflow-lock"))) == 1
    save(tmp_path / "b.ckpt", "other")
    alive.commit()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_folders_that_cannot_be_synced_are_no_error_and_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    code = errno.EINVAL

    def fsync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    sync_all([tmp_path])
    with pytest.raises(OSError, match="Invalid argument"):
        sync_all([tmp_path / "file"])
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        sync_all([tmp_path])


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


def test_what_a_replacement_has_left_goes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before and after the second of two renames, and one in a removal; with the next save or a removal."""
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    path = tmp_path / "last.ckpt"
    save(path, "old")
    killed_at(Path, "rename", 3, path)
    assert (path / "content").read_text() == "killed" and (tmp_path / "last.zenflow-replaced.ckpt").is_dir()
    save(tmp_path / "other.ckpt", "")
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "other.ckpt"]
    killed_at(Path, "rename", 3, path)
    killed_at(shutil, "rmtree", 2, path, remove)
    assert not path.exists()
    save(path, "old")
    killed_at(Path, "rename", 2, path)
    remove(path)
    save(tmp_path / "other.ckpt", "")
    assert os.listdir(tmp_path) == ["other.ckpt"]


@pytest.mark.parametrize("function", ["mkdir", "rename"])
def test_a_failure_leaves_the_previous_checkpoint_and_nothing_else(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    path = tmp_path / "a.ckpt"
    save(path, "old")
    original = getattr(Path, function)

    def failing(source: Path, *arguments: Any, **options: Any) -> Any:
        if source.name.endswith(".zenflow-saving"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(source, *arguments, **options)

    monkeypatch.setattr(Path, function, failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(path, "new")
    assert (path / "content").read_text() == "old"
    assert not list(tmp_path.glob("*replaced*"))
    assert len(os.listdir(tmp_path)) == (1 if function == "mkdir" else 3)  # a caller abandons what it could not commit


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
