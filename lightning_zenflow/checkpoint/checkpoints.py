"""A strategy's checkpoints, and a save, in three parts, of which each is completed by all ranks, or raises an error on all of them.

* *gather*: the state, as a flush has left it, is put together where the files' writer can read it: for one file on rank 0, for a folder in
  DeepSpeed's order on each rank, in memory or in files without a name (`DiskCopies`);
* *write*: each rank writes the files that it has, or with `async_checkpoints` copies what they will have;
* *commit*: behind the files of all ranks, and their syncs, rank 0 gives the checkpoint its name. With `async_checkpoints` a thread does so,
  and before it writes the copies.

Behind an error nothing of the new checkpoint remains, and the one before is as it was.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_zenflow.checkpoint.background import BackgroundSaves
from lightning_zenflow.checkpoint.engine import FolderSource
from lightning_zenflow.checkpoint.files import FileContent, StagedSave, place_of, sync_all
from lightning_zenflow.checkpoint.single_file import FILE_KEY, WholeState
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import in_common, raising_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.deepspeed.environment import Strategy
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine
from lightning_zenflow.deepspeed.users_module import as_in_training, pickled_as_before
from lightning_zenflow.worker.machine import allowed_cores
from lightning_zenflow.worker.process import WorkerError


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """What is saved as one file, which rank 0 writes."""

    state: WholeState
    content: Callable[[WholeState], Mapping[str, Any]]
    """What the file has, when `state` is put together."""
    path: Any
    io: CheckpointIO | None
    """Writes the file to `path`; None: this package."""
    storage_options: Any

    def __post_init__(self) -> None:
        """Refuses options that nothing reads."""
        if self.io is None and self.storage_options is not None:
            given = self.storage_options
            raise TypeError(f"storage_options must be None without a plugin that reads them, got {given!r}")

    def files(self, place: Any) -> list[FileContent]:
        """As of `FolderSource.files`: this rank's."""
        if dist.get_rank() != 0:
            return []
        run_state = self.state.run_state
        content = {**self.content(self.state), **({} if run_state is None else {FILE_KEY: run_state})}
        if self.io is None:
            return [FileContent(content, place)]
        return [FileContent(content, self.path, partial(self.io.save_checkpoint, storage_options=self.storage_options))]


Source: TypeAlias = FolderSource | FileSource


def plugin_of(io: CheckpointIO) -> CheckpointIO | None:
    """A strategy's `checkpoint_io` if it is the user's."""
    # By name: there is one in each of Lightning's packages.
    return None if type(io).__name__ == "TorchCheckpointIO" else io


def io_of(place: Path | str, io: CheckpointIO) -> CheckpointIO | None:
    """What writes, reads and removes a checkpoint: a user's plugin, or Lightning's own in a store; None: this package, and all folders."""
    is_ours = isinstance(place, Path) and (plugin_of(io) is None or place.is_dir())
    return None if is_ours else io


def is_one_file(format_: str, *, world_size: int) -> bool:
    """Whether a checkpoint with states is one file (`ZenFlowConfig.checkpoint_format`)."""
    return format_ == "lightning" or (format_ == "auto" and world_size == 1)


def refuse_folder(path: Any, io: CheckpointIO, format_: str) -> None:
    """Raises MisconfigurationException if a checkpoint that is a folder cannot be written here."""
    if plugin_of(io) is not None or isinstance(place_of(path), str):
        raise MisconfigurationException(
            f"checkpoint_format must be 'lightning', one file, for checkpoints in {path} by {type(io).__name__}, got {format_!r}: folders,"
            " the default on several ranks, need a local path and no plugin"
        )


class Checkpoints:
    """Those of one strategy. All ranks call the methods together."""

    trained: TrainedEngine | None = None
    """The present or last training, whose state is saved."""
    background: BackgroundSaves | None = None
    """Finishes saves of the present training; None without `async_checkpoints`."""

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: a training, and its thread, belong to this process."""
        return {}

    def begin(self, trained: TrainedEngine, strategy: Strategy) -> None:
        """Begins a training of a strategy."""
        self.trained = trained
        if trained.zenflow.async_checkpoints:
            self.background = BackgroundSaves(ranks_on_host=strategy.num_processes, timeout=strategy._timeout)

    def end(self, *, together: bool) -> None:
        """Ends what is in the background; `together` is false behind an error, when the ranks end alone."""
        background, self.background = self.background, None
        is_elsewhere = self.trained is not None and self.trained.training.is_elsewhere
        if background is not None and not is_elsewhere:
            # Otherwise training ends with another error, and the thread has logged this one.
            with nullcontext() if together else suppress(Exception):
                background.close(together=together)

    def wait(self) -> None:
        """Waits for the save in the background; raises OSError if it has failed, on this rank or on another one."""
        if self.background is not None:
            self.background.wait()

    def check(self) -> None:
        """Raises what `wait` does if the save in the background has ended."""
        if self.background is not None:
            self.background.check()

    def save(
        self, path: Any, source: Source, config: ZenFlowConfig, io: CheckpointIO, *, at_once: bool = False
    ) -> None:
        """Saves the exact state after the last step, atomically; an existing checkpoint is replaced. With `at_once` it is there at the end
        of the call, whatever `async_checkpoints` says; a plugin of the user's decides itself when it writes. OSError if the save failed,
        and the checkpoint before is as it was; or the one before, in the background, and this one is made.
        """
        before: OSError | None = None
        try:
            self.wait()
        except OSError as error:
            before = error
        trained, place = self.trained, place_of(path)
        if trained is not None:
            trained.training.flush()
            if not in_common([trained.training.steps.number]):
                raise WorkerError(
                    "an exception has interrupted the ranks in different steps: no state is exact; continue from the last checkpoint"
                )
        released = [] if trained is None else trained.released
        # A file has the parameters as they are after training, DeepSpeed's code needs its own attributes of them.
        with (
            pickled_as_before(p for of_module in released for p in of_module),
            nullcontext() if isinstance(source, FileSource) else as_in_training(released),
        ):
            background = None if at_once or plugin_of(io) is not None else self.background
            to = place if io_of(place, io) is None else str(path)
            save_together(to, source, sync=config.sync_checkpoints, background=background)
        if before is not None:
            raise before


def save_together(path: Path | str, source: Source, *, sync: bool, background: BackgroundSaves | None) -> None:
    """Gathers, writes and commits a checkpoint, as above. A collective: all ranks must call it. The `path` of rank 0 counts; if it is a
    string, `source` writes all of it. `background` finishes the save behind this call; None: all is done at the end.
    """
    staged: StagedSave | None = None
    with ExitStack() as ending:
        with _saving(path):
            if dist.get_rank() == 0 and isinstance(path, Path):
                staged = StagedSave(path, sync=sync, is_file=isinstance(source, FileSource))
                ending.callback(staged.abandon)
        places: list[Any] = [path if staged is None else staged.content, path]
        dist.broadcast_object_list(places, src=0)
        place, path = places
        # Not in the checkpoint, where network storage gives an open file another name; of a store where all such files are.
        disk = DiskCopies(path.parent if isinstance(path, Path) else Path(tempfile.gettempdir()))
        ending.callback(disk.free)
        # Gather.
        with _saving(path):
            if isinstance(place, Path) and isinstance(source, FolderSource) and not place.is_dir():
                raise OSError(f"{place}, which rank 0 has made, is not there: all nodes must share the storage")
            if source.state is not None:
                source.state.reserve(disk)
        # Write, or copy what is to be written.
        with nullcontext() if source.state is None else source.state.gathered(), _saving(path):
            is_local = isinstance(place, Path)
            left = [_write(file, disk, background, is_local=is_local) for file in source.files(place)]
        last = ending.pop_all()

    def commit(group: dist.ProcessGroup | None = None) -> None:
        with last:
            with _saving(path, group):
                for write_copy in filter(None, left):
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
) -> Callable[[], None] | None:
    """Writes a file, or copies what it has at present for the background; returns what is left to do there."""
    content, path, write = file
    # To a store Lightning writes as `torch.save`.
    if background is not None and (write is torch.save or not is_local):
        archive = background.copied(content, disk)
        if archive is not None:
            return partial(archive.write, partial(open, path, "wb") if is_local else partial(_in_store, path))
    if is_local:
        with open(path, "wb") as opened:
            write(content, opened)
    else:
        write(content, path)
    return None


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
