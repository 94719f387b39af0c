"""A checkpoint directory that appears under its name complete or not at all, whatever happens to the process that writes it.

It is written beside its place, under another name, and renamed when it is complete. Names of what is on its way begin with a dot and do not
end with those of checkpoints, so that nobody takes it for one:

* ``.NAME.saving``: being written, or already replaced; the next save of NAME deletes it.
* ``.NAME.removed``: being deleted; the next save in the same folder deletes it.
"""

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100

_RENAME_EXCHANGE = 2


def begin_save(path: Path) -> None:
    """Makes the empty folder `staging_path` that is to become `path`, and clears away what killed processes left.

    Raises:
        OSError: it cannot be made.
    """
    staging = staging_path(path)
    for leftover in (staging, *path.parent.glob(".*.removed")):
        _delete(leftover)
    staging.mkdir(parents=True)


def commit_save(path: Path) -> None:
    """Gives the folder of `begin_save` its name; what had the name is deleted.

    Atomic where the file system can exchange two names (`renameat2`: ext4, xfs, btrfs, tmpfs, overlayfs). Elsewhere a process that is
    killed between two renames leaves the old checkpoint as ``.NAME.removed`` and the new one as ``.NAME.saving``, both complete.

    Raises:
        OSError: it cannot be renamed; `path` is as it was.
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
    """Deletes what `begin_save` made and whatever is in it."""
    _delete(staging_path(path))


def remove(path: Path) -> None:
    """Deletes a checkpoint. Killed half-way, it leaves nothing under its name that looks like one."""
    if os.path.lexists(path):
        _delete(_set_aside(path))


def staging_path(path: Path) -> Path:
    """Where a checkpoint is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.saving")


def _set_aside(path: Path) -> Path:
    removed = path.with_name(f".{path.name}.removed")
    _delete(removed)
    path.rename(removed)
    return removed


def _delete(path: Path) -> None:
    """Deletes a file, a link or a folder; one that is not there, or that cannot be deleted, is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)


def _exchange(a: Path, b: Path) -> bool:
    """Has two files or folders change names at once; False where the file system or the C library cannot do that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(b))
