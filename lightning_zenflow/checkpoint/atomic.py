"""Atomic creation and replacement of checkpoint directories, safe against a kill of the writing process and a failure of power.

A checkpoint is written under a staging name in the same folder and renamed when it is complete. Names that only this module makes, with a
shortened NAME and a random TOKEN:

* ``.NAME.TOKEN.zenflow-saving``: being written, or the checkpoint that has just been replaced.
* ``.NAME.TOKEN.zenflow-lock``: file on which the process that saves holds a lock (flock), which ends with the process. The next save in
  the folder, of any name, deletes what belongs to a lock that no process holds.
* ``.NAME.TOKEN.zenflow-removed``: being deleted; the next save in the folder deletes it.
* ``STEM.zenflow-replaced.SUFFIX``: the complete checkpoint STEM.SUFFIX between two renames, see `StagedSave.commit`.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2)."""

_PROBE_BYTES = 2**20

_SAVING, _LOCK, _REMOVED, _REPLACED = (f".zenflow-{what}" for what in ("saving", "lock", "removed", "replaced"))

_LONGEST_PART = 60
"""Bytes of a checkpoint's name in the names made from it, so that these are never too long where that one is not."""


class StagedSave:
    """A checkpoint that is being saved.

    Args:
        path: path of the checkpoint.
        sync: whether the checkpoint must survive a failure of power. Files of other processes than this one are synced by them.

    Attributes:
        folder: the staging directory, empty at first; its files are to be written there.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._path = path
        self._sync = sync
        created = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        for folder in reversed(created):
            folder.mkdir(exist_ok=True)
        if sync:
            sync_all(folder.parent for folder in created)
        _clear(path.parent)
        recover(path)
        self._lock_file, self._lock = _new_lock(path)
        self.folder = self._lock_file.with_name(self._lock_file.name.removesuffix(_LOCK) + _SAVING)
        try:
            self.folder.mkdir()
        except BaseException:
            self._unlock()
            raise

    def commit(self) -> None:
        """Renames the directory to the checkpoint's path; deletes a previous checkpoint of this name.

        Atomic on file systems that can exchange two names (`renameat2`: ext4, xfs, btrfs, tmpfs, overlayfs). On others, a kill between two
        renames leaves the previous checkpoint complete under another name, until `recover`. Lightning takes it for ``last`` as well.

        Raises:
            OSError: the directory cannot be renamed or synced.
        """
        if self._sync:
            sync_all([*self.folder.rglob("*"), self.folder])
        replaced = self.folder
        if not os.path.lexists(self._path):
            self.folder.rename(self._path)
        elif not _exchange(self.folder, self._path):
            replaced = _replaced_path(self._path)
            self._path.rename(replaced)
            try:
                self.folder.rename(self._path)
            except OSError:
                recover(self._path)
                raise
        if self._sync:
            sync_all([self._path.parent])
        _discard(replaced)
        self._unlock()

    def abandon(self) -> None:
        """Deletes the directory with its content; may be called after `commit`."""
        _delete(self.folder)
        self._unlock()

    def _unlock(self) -> None:
        self._lock_file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def recover(path: Path) -> None:
    """Puts a checkpoint back in place that a save was replacing when it was killed between two renames.

    Raises:
        OSError: it cannot be renamed.
    """
    replaced = _replaced_path(path)
    if not os.path.lexists(path) and replaced.is_dir():
        replaced.rename(path)


def remove(path: Path) -> None:
    """Deletes a checkpoint; a kill on the way leaves nothing under its name."""
    # First what a killed save was replacing: alone, it would be taken for the checkpoint.
    _discard(_replaced_path(path))
    _discard(path)


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


def write_error(path: Path) -> OSError | None:
    """Why nothing can be written in a directory, or the nearest one above that exists, which torch's file writer does not say; None if
    something can.

    Call it before `StagedSave.abandon`, which makes room on a full disk.
    """
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        # A new one, which refers to no frame, and so to nothing that keeps a file open.
        return OSError(error.errno, error.strerror)
    return None


def _clear(folder: Path) -> None:
    """Deletes what killed processes have left in a folder; nothing of a process that is alive, and nothing of the user's."""
    names = set(os.listdir(folder))
    for name in names:
        file = folder / name
        # What cannot be deleted, as another user's, is no reason not to save.
        with contextlib.suppress(OSError):
            if name.startswith(".") and name.endswith(_REMOVED):
                _delete(file)
            elif name.startswith(".") and name.endswith(_LOCK):
                lock = _try_lock(file)
                if lock is not None:
                    _delete(folder / (name.removesuffix(_LOCK) + _SAVING))
                    file.unlink(missing_ok=True)
                    os.close(lock)
            elif (replaced := _replaced_path(file)).name in names:
                # The new checkpoint is in place.
                _discard(replaced)


def _new_lock(path: Path) -> tuple[Path, int | None]:
    """Creates a lock file for a save; returns it with its descriptor, None where the file system has no locks.

    Without a lock no process can tell that this one has ended, and none deletes its files.
    """
    attempts = 3  # another process may have taken the lock of the new file for that of a killed one
    for _ in range(attempts):
        file = _beside(path, _LOCK)
        file.touch(exist_ok=False)
        lock = _try_lock(file)
        if lock is not None:
            return file, lock
        file.unlink(missing_ok=True)
    file.touch()
    return file, None


def _try_lock(file: Path) -> int | None:
    """Locks a file that exists; None if another process holds the lock or has deleted the file, or if there are no locks."""
    fd = None
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), file.stat()):
            return fd
    except OSError:
        pass
    if fd is not None:
        os.close(fd)
    return None


def _beside(path: Path, suffix: str) -> Path:
    """A new name in the folder of a checkpoint."""
    return path.with_name(f".{_shortened(path.name)}.{secrets.token_hex(4)}{suffix}")


def _replaced_path(path: Path) -> Path:
    """Name of a checkpoint between two renames: that of a checkpoint, so that Lightning finds the last one under it."""
    stem, suffix = path.stem, path.suffix
    if len(os.fsencode(path.name)) > _LONGEST_PART:
        digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        stem, suffix = f"{_shortened(stem)}.{digest}", _shortened(suffix)
    return path.with_name(f"{stem}{_REPLACED}{suffix}")


def _shortened(name: str) -> str:
    return os.fsencode(name)[:_LONGEST_PART].decode(errors="ignore")


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


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two names atomically; False if the file system or the C library does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(b))
