"""Atomic creation and replacement of checkpoint directories, safe against a kill of the writing process.

A checkpoint is written under a staging name in the same folder and renamed when it is complete. The names of incomplete directories begin
with a dot and do not end like those of checkpoints:

* ``.NAME.saving``: being written, or replaced; the next save of NAME deletes it.
* ``.NAME.removed``: being deleted; the next save in the same folder deletes it.
"""

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2)."""


_PROBE_BYTES = 2**20


def begin_save(path: Path) -> None:
    """Creates the empty directory `staging_path`, and deletes remains of killed processes.

    Raises:
        OSError: the directory cannot be created.
    """
    staging = staging_path(path)
    for leftover in (staging, *path.parent.glob(".*.removed")):
        _delete(leftover)
    staging.mkdir(parents=True)


def commit_save(path: Path) -> None:
    """Renames the directory of `begin_save` to `path`; deletes a previous checkpoint of this name.

    Atomic on file systems that can exchange two names (`renameat2`: ext4, xfs, btrfs, tmpfs, overlayfs). On others, a kill between two
    renames leaves the old checkpoint as ``.NAME.removed`` and the new one as ``.NAME.saving``, both complete.

    Raises:
        OSError: the directory cannot be renamed; `path` is unchanged.
    """
    staging = staging_path(path)
    if not os.path.lexists(path):
        staging.rename(path)
    elif _exchange(staging, path):
        _delete(staging)
    else:
        removed = _set_aside(path)
        staging.rename(path)
        _delete(removed)


def abandon_save(path: Path) -> None:
    """Deletes the directory of `begin_save` with its content."""
    _delete(staging_path(path))


def remove(path: Path) -> None:
    """Deletes a checkpoint; a kill on the way leaves nothing under its name."""
    if os.path.lexists(path):
        _delete(_set_aside(path))


def staging_path(path: Path) -> Path:
    """Directory that is renamed to `path` when the checkpoint is complete."""
    return path.with_name(f".{path.name}.saving")


def write_error(path: Path) -> OSError | None:
    """Why nothing can be written beside or below `path`, which torch's file writer does not say; None if something can.

    Call it before `abandon_save`, which makes room on a full disk.
    """
    folder = next(folder for folder in (staging_path(path), *path.parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        # A new one, which refers to no frame, and so to nothing that keeps a file open.
        return OSError(error.errno, error.strerror)
    return None


def _set_aside(path: Path) -> Path:
    removed = path.with_name(f".{path.name}.removed")
    _delete(removed)
    path.rename(removed)
    return removed


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
