"""Directories and files that are complete or absent, whatever is killed or fails: `checkpoint.files` without training."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_zenflow.checkpoint import files
from lightning_zenflow.checkpoint.files import StagedSave, recover, remove, sync_all

OF_THE_USER = [".notes.removed", ".old.removed", ".a.ckpt.saving", "b.replaced.ckpt", ".lock"]


def save(path: Path, content: str, *, is_file: bool = False) -> None:
    staged = StagedSave(path, sync=False, is_file=is_file)
    (staged.content if is_file else staged.content / "latest").write_text(content)
    staged.commit()


def killed(action: Callable[[], None], event: int) -> bool:
    """Does it in another process, which is killed before its n-th call of the file system, from 0; False if there are not so many."""
    pid = os.fork()
    if pid == 0:
        seen = count()

        def hook(name: str, _: Any) -> None:
            if name.startswith(("open", "os.", "shutil.")) and next(seen) == event:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def content_of(path: Path) -> str:
    return (path if path.is_file() else path / "latest").read_text()


@pytest.mark.parametrize(
    ("name", "are_files"),
    [
        ("last.ckpt", (False, False)),
        ("b" * 200, (True, True)),
        pytest.param("last.ckpt", (False, True), marks=pytest.mark.slow),
        pytest.param("b" * 200, (True, False), marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_call(name: str, are_files: tuple[bool, bool], tmp_path: Path) -> None:
    """A replacement leaves one of both checkpoints, which Lightning finds as the last one, and a removal none that is incomplete; the next
    save of the name deletes everything else, and nothing of the user's or of another checkpoint's."""
    path = tmp_path / name
    for precious in OF_THE_USER:
        (tmp_path / precious).mkdir()
        (tmp_path / precious / "file").touch()
    for event in count():
        save(path, "old", is_file=are_files[0])
        if not killed(partial(save, path, "new", is_file=are_files[1]), event):
            break
        # A file takes the place of a file at once.
        assert all(are_files) <= path.is_file()
        left = list(tmp_path.glob(f"{path.stem}*{path.suffix}"))
        assert left and {content_of(p) for p in left} <= {"old", "new"}
        if event % 2:
            recover(path)
            assert content_of(path) in ("old", "new")
        else:
            remove(path)
            assert not path.exists()
        save(path, "next")
        assert {*os.listdir(tmp_path)} == {*OF_THE_USER, name}
    assert event > 10
    for event in count():
        save(path, "old", is_file=are_files[0])
        if not killed(partial(remove, path), event):
            break
        assert not path.exists() or content_of(path) == "old"
        save(path, "next")
        assert {*os.listdir(tmp_path)} == {*OF_THE_USER, name}
    assert event > 1 and not path.exists()
    remove(path)
    assert all((tmp_path / precious / "file").exists() for precious in OF_THE_USER)


@pytest.mark.parametrize("is_file", [True, False])
def test_two_saves_of_one_name_at_once(is_file: bool, tmp_path: Path) -> None:
    """The one that began later is complete, and the other one fails, even if one of its ranks makes its folder again; other names are left
    alone."""
    path = tmp_path / "a.ckpt"
    first, other = (StagedSave(p, sync=False, is_file=is_file) for p in (path, tmp_path / "other.ckpt"))
    save(path, "second", is_file=is_file)
    first.content.mkdir(parents=True)
    with pytest.raises(OSError, match="another process has begun to save under this name"):
        first.commit()
    first.abandon()
    assert content_of(path) == "second"
    assert {*os.listdir(tmp_path)} == {"a.ckpt", other.content.parent.name}


def test_folders_that_cannot_be_synced_are_no_error_and_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fsync := Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    sync_all([tmp_path])
    with pytest.raises(OSError, match="Invalid argument"):
        sync_all([tmp_path / "file"])
    fsync.side_effect = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        sync_all([tmp_path])


def test_a_failure_leaves_the_previous_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    save(path, "old")
    original = Path.rename

    def failing(source: Path, *arguments: Any) -> Any:
        if source.name == "folder":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(source, *arguments)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(path, "new")
    assert content_of(path) == "old"
    assert not list(tmp_path.glob("*replaced*"))
    assert len(os.listdir(tmp_path)) == 2  # a caller abandons what it could not commit


@pytest.mark.parametrize("sync", [True, False])
def test_all_is_on_the_disk_before_it_has_its_name(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the rename: all files and folders of the checkpoint; before the old one goes: the folder with the new name."""
    path = tmp_path / "new" / "folder" / "a.ckpt"
    synced: set[str] = set()
    events: list[str] = []
    rename, discard = Path.rename, files._discard

    def noting_rename(source: Path, target: Path) -> Path:
        if target == path:
            assert sync == {str(source), *map(str, source.rglob("*"))}.issubset(synced)
            events.append("named")
            synced.clear()
        return rename(source, target)

    def noting_discard(old: Path, checkpoint: Path) -> None:
        if old.exists():
            assert sync == (str(path.parent) in synced)
            events.append("deleted")
        discard(old, checkpoint)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(Path, "rename", noting_rename)
    monkeypatch.setattr(files, "_discard", noting_discard)
    for name in ("first", "second"):
        staged = StagedSave(path, sync=sync)
        assert name == "second" or sync == {str(tmp_path), str(tmp_path / "new")}.issubset(synced)
        (staged.content / "checkpoint").mkdir()
        (staged.content / "checkpoint" / "model_states.pt").write_text(name)
        staged.commit()
    assert events == ["named", "named", "deleted"]


FOLDERS: dict[str, list[str]] = {
    "results": ["table.csv", "plots/a.png"],
    "a checkpoint with notes": ["latest", "checkpoint/mp_rank_00_model_states.pt", "notes.txt"],
    "notes among its files": ["latest", "checkpoint/mp_rank_00_model_states.pt", "checkpoint/notes.txt"],
    "several of DeepSpeed's": ["latest", "step1/mp_rank_00_model_states.pt", "step2/mp_rank_00_model_states.pt"],
    "checkpoints": ["a.ckpt"],
    "folders": ["checkpoint/a_states.pt/file"],
    "hidden": [".git"],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_checkpoint_stays(name: str, tmp_path: Path) -> None:
    path = folder = tmp_path / "results"
    for file in FOLDERS[name]:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    if name == "results":
        path = tmp_path / "link"
        path.symlink_to(folder)
    before = sorted(tmp_path.rglob("*"))
    for action in (partial(save, path, "new"), partial(save, path, "new", is_file=True), partial(remove, path)):
        with pytest.raises(IsADirectoryError, match=f"{path} must be a checkpoint.* choose another path"):
            action()
        assert sorted(tmp_path.rglob("*")) == before


def test_empty_and_incomplete_folders_are_replaced(tmp_path: Path) -> None:
    """DeepSpeed writes the file `latest` last."""
    for name in ("empty", "checkpoint/mp_rank_00_model_states.pt"):
        path = tmp_path / "a.ckpt"
        (path / name).parent.mkdir(parents=True)
        if name != "empty":
            (path / name).touch()
        save(path, "new", is_file=True)
        assert path.read_text() == "new"
        path.unlink()
