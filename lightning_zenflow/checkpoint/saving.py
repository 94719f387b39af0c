"""Collective saving of checkpoints: either all ranks succeed, or all ranks raise an error, and nothing of the checkpoint remains."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_zenflow.checkpoint.background import Archive, BackgroundSaves
from lightning_zenflow.checkpoint.engine import files_of_engine
from lightning_zenflow.checkpoint.files import StagedSave, sync_all
from lightning_zenflow.checkpoint.order import DeepSpeedsOrder
from lightning_zenflow.checkpoint.single_file import FILE_KEY, WholeState
from lightning_zenflow.core.distributed import raising_together
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.worker.machine import allowed_cores


class FileContent(NamedTuple):
    """A file that this rank writes."""

    content: Any
    path: Any
    write: Callable[[Any, Any], None] = torch.save
    """Writes `content` to a path or an open file."""


class Source(Protocol):
    """What is saved. All ranks call the methods together, in this order."""

    is_file: bool
    """Whether the checkpoint is one file."""

    def reserve(self, disk: DiskCopies) -> None:
        """Takes the memory that `gathered` needs; may fail on some ranks."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which the ranks have put together what the files are to have. A collective."""

    def files(self, place: Any) -> Sequence[FileContent]:
        """This rank's files, in `gathered`, of a checkpoint at `place`; no collective, and may fail on some ranks."""


class FolderSource:
    """DeepSpeed's folder.

    Args:
        engine: DeepSpeed's, of the model.
        optimizer: whose state is saved, if any.
        client_state: what is saved besides.
        without_frozen: whether weights are left out that are not trained at present.
    """

    is_file = False

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: ZenFlowOptimizer | None,
        client_state: Mapping[str, Any],
        *,
        without_frozen: bool,
    ) -> None:
        self._engine, self._client_state, self._without_frozen = engine, dict(client_state), without_frozen
        self._order = DeepSpeedsOrder(optimizer)

    def reserve(self, disk: DiskCopies) -> None:
        """As of `Source`."""
        self._order.reserve(disk)

    def gathered(self) -> AbstractContextManager[None]:
        """As of `Source`."""
        return self._order.gathered()

    def files(self, place: Any) -> Sequence[FileContent]:
        """As of `Source`."""
        written = files_of_engine(
            self._engine, place, self._client_state, exclude_frozen_parameters=self._without_frozen
        )
        return [FileContent(*of_one) for of_one in written]


class FileSource:
    """One file, which rank 0 writes.

    Args:
        state: of model and optimizer.
        content: what the file has, when `state` is put together.
        path: of the file, for `io`.
        io: writes the file; None: this package.
        storage_options: for `io`.

    Raises:
        TypeError: there are options that nothing reads.
    """

    is_file = True

    def __init__(
        self,
        state: WholeState,
        content: Callable[[WholeState], Mapping[str, Any]],
        path: Any,
        io: CheckpointIO | None,
        storage_options: Any,
    ) -> None:
        if io is None and storage_options is not None:
            raise TypeError(f"storage_options must be None without a plugin that reads them, got {storage_options!r}")
        self._state, self._content, self._path, self._io = state, content, path, io
        self._storage_options = storage_options

    def reserve(self, disk: DiskCopies) -> None:
        """As of `Source`."""
        self._state.reserve(disk)

    def gathered(self) -> AbstractContextManager[None]:
        """As of `Source`."""
        return self._state.gathered()

    def files(self, place: Any) -> Sequence[FileContent]:
        """As of `Source`."""
        if dist.get_rank() != 0:
            return []
        run_state = self._state.run_state
        content = {**self._content(self._state), **({} if run_state is None else {FILE_KEY: run_state})}
        if self._io is None:
            return [FileContent(content, place)]
        return [
            FileContent(content, self._path, partial(self._io.save_checkpoint, storage_options=self._storage_options))
        ]


def save_together(path: Path | str, source: Source, *, sync: bool, background: BackgroundSaves | None = None) -> None:
    """Saves a checkpoint atomically, after all ranks have written their files. A collective: all ranks must call it.

    Args:
        path: of the checkpoint, on all ranks that of rank 0; an existing checkpoint is replaced. A string: `source` writes all of it.
        source: what is saved.
        sync: whether the checkpoint must survive a failure of power.
        background: writes files, syncs them and commits while training goes on, and raises errors of that; None: all is done at the end.

    Raises:
        OSError: a rank could not write its files, or the path is of a folder that is no checkpoint; `path` is unchanged, and nothing of the
            new checkpoint remains.
    """
    staged: StagedSave | None = None
    with ExitStack() as ending:
        with _saving(path):
            if dist.get_rank() == 0 and isinstance(path, Path):
                staged = StagedSave(path, sync=sync, is_file=source.is_file)
                ending.callback(staged.abandon)
        places: list[Any] = [path if staged is None else staged.content, path]
        dist.broadcast_object_list(places, src=0)
        place, path = places
        # Not in the checkpoint, where network storage gives an open file another name; of a store where all such files are.
        disk = DiskCopies(path.parent if isinstance(path, Path) else Path(tempfile.gettempdir()))
        ending.callback(disk.free)
        # Gather.
        with _saving(path):
            if isinstance(place, Path) and not source.is_file and not place.is_dir():
                raise OSError(f"{place}, which rank 0 has made, is not there: all nodes must share the storage")
            source.reserve(disk)
        # Write, or copy what is to be written.
        with source.gathered(), _saving(path):
            copies = [_write(file, disk, background, is_local=isinstance(place, Path)) for file in source.files(place)]
        last = ending.pop_all()

    def commit(group: dist.ProcessGroup | None = None) -> None:
        with last:
            with _saving(path, group):
                for write_copy in copies:
                    write_copy()
                if sync and isinstance(place, Path):
                    # Each rank its own, since network storage keeps what has been written with the host that wrote it.
                    sync_all(place.glob(f"*/*zero_pp_rank_{dist.get_rank()}_mp_rank_*"))
            with _saving(path, group):
                if staged is not None:
                    staged.commit()

    if background is None:
        commit()
    else:
        background.start(commit)


def _write(
    file: FileContent, disk: DiskCopies, background: BackgroundSaves | None, *, is_local: bool
) -> Callable[[], None]:
    """Writes a file, or copies what it has at present for the background; returns what is left to do."""
    content, path, write = file
    archive = None
    # To a store Lightning writes as `torch.save`.
    if background is not None and (write is torch.save or not is_local):
        archive = background.copied(content, disk)
    if archive is not None:
        return partial(_write_archive, archive, path, partial(open, mode="wb") if is_local else _in_store)
    if is_local:
        with open(path, "wb") as opened:
            write(content, opened)
    else:
        write(content, path)
    return _nothing


def _nothing() -> None:
    pass


def _write_archive(archive: Archive, path: Any, opening: Callable[[Any], AbstractContextManager[Any]]) -> None:
    with opening(path) as file:
        archive.write(file)


@contextmanager
def _in_store(url: str) -> Iterator[Any]:
    """Context with a new file of a store, which is not there unless it is complete; as Lightning's `TorchCheckpointIO`."""
    store = get_filesystem(url)
    store.makedirs(os.path.dirname(url), exist_ok=True)
    with store.transaction, store.open(url, "wb") as file:
        yield file


@contextmanager
def all_cores(*, ranks_on_host: int) -> Iterator[None]:
    """Context in which torch uses this rank's share of all allowed cores, in a save, while the worker has nothing to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, len(allowed_cores()) // ranks_on_host))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _saving(path: Path | str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises an error of this part of a save on all ranks, with its cause and what to do about it."""
    with raising_together(OSError, group):
        try:
            yield
        except IsADirectoryError:
            raise
        except Exception as reason:
            # Of any kind: the client state has the user's objects, which may refuse to be pickled.
            # torch's writer raises RuntimeError behind an error of the file.
            cause = next((e for e in (reason, reason.__context__) if isinstance(e, OSError)), None)
            advice = ""
            if cause is not None and cause.errno == errno.EFBIG:
                advice = " Raise the limit of a file's size (`ulimit -f`), or save to another path"
            elif cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = (
                    " Delete files there, or save to another path; while a checkpoint is saved, those before it stay: keep fewer with"
                    " `ModelCheckpoint(save_top_k=...)`"
                )
            raise OSError(
                f"checkpoint {path} could not be saved: {cause or reason}; training can continue.{advice}"
            ) from reason
