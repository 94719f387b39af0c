"""Files of checkpoints: where they are; atomic creation and replacement, safe against a kill of the writing process and a failure of power;
and what torch has written, read and compared with its checksums, with errors that name the file.

A checkpoint, directory or file, is written in a staging directory in the same folder and renamed when it is complete. Names that only this
module makes, with a random TOKEN:

* ``.TOKEN.zenflow-saving``: being written.
* ``.TOKEN.zenflow-lock``: file on which the process that saves holds a lock (flock), which ends with the process. The next save in the
  folder, of any name, deletes what belongs to a lock that no process holds.
* ``.TOKEN.zenflow-removed``: being deleted; the next save in the folder deletes it.
* ``STEM.zenflow-replaced.SUFFIX``: the complete checkpoint STEM.SUFFIX between two renames, see `StagedSave.commit`.
"""

import contextlib
import errno
import fcntl
import os
import pickle
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zenflow.core.forks import LOCK, SAVING
from lightning_zenflow.deepspeed.host_state import WithoutConversion
from lightning_zenflow.offload.run_state import VERSION

_OF_DEEPSPEED = re.compile(r"latest|zero_to_\w+\.py|[^/]+/[^/]+_states\.pt")
"""Files of a checkpoint; a folder in it has those of the ranks."""

_REMOVED, _REPLACED = ".zenflow-removed", ".zenflow-replaced"


class StagedSave:
    """A checkpoint that is being saved.

    Args:
        path: path of the checkpoint.
        sync: whether the checkpoint must survive a failure of power. Files of other processes than this one are synced by them.
        is_file: whether it is a single file.

    Attributes:
        content: what becomes the checkpoint: the staging directory, empty at first, to which its files are to be written; or the file to
            be written in it.

    Raises:
        IsADirectoryError: a folder has the path that is no checkpoint.
        OSError: the directory cannot be created.
    """

    def __init__(self, path: Path, *, sync: bool, is_file: bool = False) -> None:
        refuse_folder(path)
        self._path = path
        self._sync = sync
        created = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        for folder in reversed(created):
            folder.mkdir(exist_ok=True)
        if sync:
            sync_all(folder.parent for folder in created)
        _clear(path.parent)
        recover(path)
        self._lock_file = _beside(path, LOCK)
        self._lock_file.touch()
        # Without a lock no process can tell that this one has ended, and none deletes its files.
        self._lock_fd = _lock(self._lock_file, wait=True)
        self._folder = self._lock_file.with_suffix(SAVING)
        # Not the checkpoint's own name: torch refuses some, such as ".hidden".
        self.content = self._folder / "file" if is_file else self._folder
        try:
            self._folder.mkdir()
        except BaseException:
            self.abandon()
            raise

    def commit(self) -> None:
        """Gives the content the checkpoint's path; deletes a previous checkpoint of this name.

        A file takes the place of another one at once. Where either is a directory, a kill between two renames leaves the previous
        checkpoint complete under another name, until `recover`. Lightning takes it for ``last`` as well. Names are not exchanged in one
        system call, since network file systems cannot do it.

        Raises:
            OSError: the content cannot be renamed or synced.
        """
        if self._sync:
            sync_all([*self._folder.rglob("*"), self._folder])
        replaced = _replaced_path(self._path)
        if os.path.lexists(self._path) and (self._path.is_dir() or self.content.is_dir()):
            self._path.rename(replaced)
        try:
            self.content.rename(self._path)
        except BaseException:
            recover(self._path)
            raise
        if self._sync:
            sync_all([self._path.parent])
        _discard(replaced)
        self.abandon()

    def abandon(self) -> None:
        """Deletes the directory with what is left in it, and ends the lock; may be called again, and after `commit`."""
        _delete(self._folder)
        self._lock_file.unlink(missing_ok=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def recover(path: Path) -> None:
    """Puts a checkpoint back in place that a save was replacing when it was killed between two renames.

    Raises:
        OSError: it cannot be renamed.
    """
    replaced = _replaced_path(path)
    if not os.path.lexists(path) and os.path.lexists(replaced):
        replaced.rename(path)


def refuse_folder(path: Path) -> None:
    """Refuses a folder that has more in it than a checkpoint of DeepSpeed's; an empty folder, and all that is none, may be replaced.

    Raises:
        IsADirectoryError: names the folder, and what is in it.
    """
    if not path.is_dir():
        return
    entries = [*path.glob("*"), *path.glob("*/*")]
    folders = sorted({entry.parent for entry in entries} - {path})
    is_saved = {entry: entry.is_file() and _OF_DEEPSPEED.fullmatch(str(entry.relative_to(path))) for entry in entries}
    # Of several folders, a user's own code has saved all but one.
    others = [entry for entry in entries if entry not in folders and not is_saved[entry]] + folders[1:]
    if others:
        raise IsADirectoryError(
            f"{path} must be a checkpoint, an empty folder or a new name, got a folder with {others[0].name!r}, which"
            " ZenFlow does not delete: choose another path, or delete the folder if nobody needs it"
        )


def remove(path: Path) -> None:
    """Deletes a checkpoint; a kill on the way leaves nothing under its name.

    Raises:
        IsADirectoryError: the path is of a folder that is no checkpoint.
        OSError: it cannot be deleted.
    """
    refuse_folder(path)
    try:
        # First what a killed save was replacing: alone, it would be taken for the checkpoint.
        _discard(_replaced_path(path))
        _discard(path)
    except OSError as error:
        raise OSError(f"checkpoint {path} could not be removed: {error}; training can continue") from error


def sync_all(paths: Iterable[Path]) -> None:
    """Makes the content of files and the entries of directories survive a failure of power.

    Raises:
        OSError: a disk has failed or, on network storage, is full.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems do not sync directories.
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS):
                raise
        finally:
            os.close(fd)


def _clear(folder: Path) -> None:
    """Deletes what killed processes have left in a folder; nothing of a process that is alive, and nothing of the user's."""
    names = set(os.listdir(folder))
    for file in map(folder.joinpath, names):
        # What cannot be deleted, as another user's, is no reason not to save.
        with contextlib.suppress(OSError):
            if file.suffix == _REMOVED:
                _delete(file)
            elif file.suffix == LOCK and (lock := _lock(file, wait=False)) is not None:
                _delete(file.with_suffix(SAVING))
                file.unlink(missing_ok=True)
                os.close(lock)
            elif (replaced := _replaced_path(file)).name in names:
                # The new checkpoint is in place.
                _discard(replaced)


def _lock(file: Path, *, wait: bool) -> int | None:
    """Locks a file; None if another process holds the lock (and `wait` is false) or has deleted the file, or if there are no locks.

    The process that saves waits for one that looks whether it is alive, which takes no time.
    """
    with contextlib.suppress(OSError):
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return fd
        except OSError:
            os.close(fd)
    return None


def _beside(path: Path, suffix: str) -> Path:
    """A new name in the folder of a checkpoint."""
    return path.with_name(f".{secrets.token_hex(8)}{suffix}")


def _replaced_path(path: Path) -> Path:
    """Name of a checkpoint between two renames: that of a checkpoint, so that Lightning finds the last one under it."""
    return path.with_name(f"{path.stem}{_REPLACED}{path.suffix}")


def _discard(path: Path) -> None:
    """Deletes a file or directory so that a kill on the way leaves nothing under its name; ignores a missing one."""
    if os.path.lexists(path):
        removed = _beside(path, _REMOVED)
        with contextlib.suppress(FileNotFoundError):
            path.rename(removed)
        _delete(removed)


def _delete(path: Path) -> None:
    """Deletes a file, link or directory; ignores a missing one and one that cannot be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)


def place_of(path: Any) -> Path | str:
    """An absolute path of the local file system; or a store's URL, which fsspec knows, as it is."""
    scheme, separator, name = str(path).partition("://")
    if separator and scheme not in ("file", "local"):
        return str(path)
    # The process may be in another folder when a thread writes. Without a trailing slash, as the name of a file.
    return Path(os.path.abspath(name if separator else scheme))


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model; the message names the checkpoint or the file."""


def refusal(path: Path | str, message: str) -> CheckpointError:
    """The error of a checkpoint or one of its files."""
    return CheckpointError(f"checkpoint {path}: {message}")


def refuse_other_version(path: Path | str, ours: Mapping[str, Any] | None, weights: str) -> None:
    """Raises CheckpointError if another version has written what continues the run, a rank's `ZenFlowStep.state_dict` if there is one;
    `weights` says how one begins from its weights.
    """
    if ours is not None and ours["version"] != VERSION:
        raise refusal(
            path,
            f"the layout must be {VERSION}, got {ours['version']}: another version of lightning-zenflow wrote the checkpoint; continue with"
            f" that version, or begin anew from its weights{weights}",
        )


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Converts every error of a file that torch cannot read.

    Raises:
        CheckpointError: names the file; its cause is the error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise refusal(
            file,
            f"this file has a Python object that cannot be loaded ({type(error).__name__}: {error}): what defined it when it was saved, as"
            " the class of a hyperparameter, must be importable under the same name",
        ) from error
    except Exception as error:
        raise refusal(file, f"this file is truncated or damaged ({type(error).__name__}: {error})") from error


def verify(file: Path) -> None:
    """Compares a file written by torch with its checksums; one of torch's former format has none.

    Raises:
        CheckpointError: it is damaged.
    """
    with _reading(file):
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                # 0 where torch was told to compute none.
                if entry.CRC != 0:
                    with archive.open(entry) as content:
                        while content.read(2**20):
                            pass


def read(file: Path, *, mapped: bool = True, weights_only: bool | None = False) -> Any:
    """Content of a file written by torch; large tensors are memory-mapped, or not.

    Args:
        file: the file.
        mapped: whether they are.
        weights_only: see `torch.load`; None is its default.

    Raises:
        CheckpointError: see `verify`; or the file has other objects than `weights_only` allows.
    """
    # A file that is no archive has torch's former format, which cannot be mapped, or is incomplete.
    with _reading(file), WithoutConversion():
        is_archive = zipfile.is_zipfile(file)
        try:
            return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped and is_archive)
        except pickle.UnpicklingError as error:
            if weights_only is False or not is_archive:
                raise
            raise refusal(file, "this file has Python objects: if you trust it, pass `weights_only=False`") from error
