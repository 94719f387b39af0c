"""Files of checkpoints: where they are; atomic replacement, safe against kills and failures of power; errors that name the file.

A checkpoint, directory or file, is written in a directory beside it and renamed when it is complete (docs/reliability.md, *Killed saves*,
has the names). What is deleted gets such a name first.
"""

import contextlib
import errno
import hashlib
import os
import pickle
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO

from lightning_zenflow.core.process import SAVING
from lightning_zenflow.core.saved_tensors import WithoutConversion
from lightning_zenflow.offload.run_state import VERSION

_OF_DEEPSPEED = re.compile(r"latest|zero_to_\w+\.py|[^/]+/[^/]+_states\.pt")
"""Files of a checkpoint; a folder in it has those of the ranks."""


class StagedSave:
    """A checkpoint that is being saved, of which `content` becomes the checkpoint: an empty directory for its files, or the file to be
    written. With `sync` it survives a failure of power, if other processes sync their files themselves.
    """

    def __init__(self, path: Path, *, sync: bool, is_file: bool = False) -> None:
        refuse_folder(path)
        self._path = path
        self._sync = sync
        created = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        if sync:
            sync_all(folder.parent for folder in created)
        recover(path)
        # Another process that saves this checkpoint has lost its files, which it finds out in `commit`.
        for leftover in (*path.parent.glob(_beside(path, token="*").name), _replaced_path(path)):
            # What cannot be deleted, as another user's, is no reason not to save.
            with contextlib.suppress(OSError):
                _discard(leftover, path)
        self._folder = _beside(path)
        # Where another process has cleared this folder, a rank that has more to write may make it again, without this.
        self._mark = self._folder / "begun"
        # Not the checkpoint's own name: torch refuses some, such as ".hidden".
        self.content = self._folder / ("file" if is_file else "folder")
        try:
            self._folder.mkdir()
            self._mark.touch()
            if not is_file:
                self.content.mkdir()
        except BaseException:
            self.abandon()
            raise

    def commit(self) -> None:
        """Gives the content the checkpoint's path; deletes a previous checkpoint of this name.

        A file takes the place of another one at once. Where either is a directory, a kill between two renames leaves the previous
        checkpoint complete under another name, until `recover`: network file systems cannot exchange names in one system call.
        """
        if not self._mark.exists():
            raise OSError("another process has begun to save under this name meanwhile")
        if self._sync:
            sync_all([*self.content.rglob("*"), self.content])
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
        _discard(replaced, self._path)
        self.abandon()

    def abandon(self) -> None:
        """Deletes the directory with what is left in it; may be called again, and after `commit`."""
        _delete(self._folder)


def recover(path: Path) -> None:
    """Puts a checkpoint back in place that a save was replacing when it was killed between two renames."""
    replaced = _replaced_path(path)
    if not os.path.lexists(path) and os.path.lexists(replaced):
        replaced.rename(path)


def refuse_folder(path: Path) -> None:
    """Raises IsADirectoryError for a folder that has more in it than a checkpoint of DeepSpeed's; an empty folder may be replaced."""
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
    """Deletes a checkpoint, behind `refuse_folder`; a kill on the way leaves nothing under its name."""
    refuse_folder(path)
    try:
        # First what a killed save was replacing: alone, it would be taken for the checkpoint.
        _discard(_replaced_path(path), path)
        _discard(path, path)
    except OSError as error:
        raise OSError(f"checkpoint {path} could not be removed: {error}; training can continue") from error


def sync_all(paths: Iterable[Path]) -> None:
    """Makes the content of files and the entries of directories survive a failure of power."""
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


def _beside(path: Path, token: str = "") -> Path:
    """A new name in the folder of a checkpoint; one with the checkpoint's own name in it might be too long."""
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()
    return path.with_name(f".{name}.{token or secrets.token_hex(8)}{SAVING}")


def _replaced_path(path: Path) -> Path:
    """Name of a checkpoint between two renames: that of a checkpoint, so that Lightning finds the last one under it."""
    return path.with_name(f"{path.stem}.zenflow-replaced{path.suffix}")


def _discard(path: Path, checkpoint: Path) -> None:
    """Deletes a file or directory of a checkpoint so that a kill on the way leaves nothing under its name; ignores a missing one."""
    if os.path.lexists(path):
        removed = _beside(checkpoint)
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


def plugin_of(io: CheckpointIO) -> CheckpointIO | None:
    """A strategy's `checkpoint_io` if it is the user's."""
    # By name: there is one in each of Lightning's packages.
    return None if type(io).__name__ == "TorchCheckpointIO" else io


def io_of(place: Path | str, io: CheckpointIO) -> CheckpointIO | None:
    """What writes, reads and removes a checkpoint: a user's plugin, or Lightning's own in a store; None: this package, and all folders."""
    is_ours = isinstance(place, Path) and (plugin_of(io) is None or place.is_dir())
    return None if is_ours else io


class FileContent(NamedTuple):
    """A file that a rank writes."""

    content: Any
    path: Any
    write: Callable[[Any, Any], None] = torch.save
    """Writes `content` to a path or an open file."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model; the message names the checkpoint or the file."""


def refusal(path: Path | str, message: str) -> CheckpointError:
    """The error of a checkpoint or one of its files."""
    return CheckpointError(f"checkpoint {path}: {message}")


def refuse_other_version(path: Path | str, ours: Mapping[str, Any] | None, weights: str) -> None:
    """Raises CheckpointError if another version wrote a rank's `ZenFlowStep.state_dict`; `weights` says how one begins from its weights."""
    if ours is not None and ours["version"] != VERSION:
        raise refusal(
            path,
            f"the layout must be {VERSION}, got {ours['version']}: another version of lightning-zenflow wrote the checkpoint; continue with"
            f" that version, or begin anew from its weights{weights}",
        )


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Converts every error of a file that torch cannot read to a CheckpointError."""
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
    """Raises CheckpointError if a file written by torch differs from its checksums; one of torch's former format has none."""
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
    """Content of a file written by torch, `mapped` to memory or not; `weights_only` as of `torch.load`. Raises CheckpointError."""
    # A file that is no archive has torch's former format, which cannot be mapped, or is incomplete.
    with _reading(file), WithoutConversion():
        is_archive = zipfile.is_zipfile(file)
        try:
            return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped and is_archive)
        except pickle.UnpicklingError as error:
            if weights_only is False or not is_archive:
                raise
            raise refusal(file, "this file has Python objects: if you trust it, pass `weights_only=False`") from error
