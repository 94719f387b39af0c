"""A strategy's checkpoints, and a save, in three parts, of which each is completed by all ranks, or raises an error on all of them.
*Gather*: the state, as a flush has left it, is put together where the writer of a file can read it. *Write*: each rank writes its files, or
copies what they will have. *Commit*: behind the files of all ranks, and their syncs, rank 0 gives the checkpoint its name.

Behind an error nothing of the new checkpoint remains, and the one before is as it was.
"""

import errno
import logging
import os
import pickle
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor, UntypedStorage

# Private: what `torch.save` consists of, and what finds the tensors in nested containers.
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zenflow.checkpoint.engine import FolderSource
from lightning_zenflow.checkpoint.files import FileContent, StagedSave, io_of, place_of, plugin_of, sync_all
from lightning_zenflow.checkpoint.single_file import FileSource
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import all_agree, in_common, new_pages, raise_together, raising_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.deepspeed.environment import Strategy
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine
from lightning_zenflow.deepspeed.users_module import as_in_training, pickled_as_before
from lightning_zenflow.worker.machine import allowed_cores, free_host_memory
from lightning_zenflow.worker.process import WorkerError

_log = logging.getLogger(__name__)

Source: TypeAlias = FolderSource | FileSource

_Put: TypeAlias = Callable[[Any], None]
"""Has a plugin, or Lightning for a store, write the content of the one file of a checkpoint."""


class Checkpoints:
    """Those of one strategy, with the `config` of its trainings. With `async_checkpoints` a thread finishes saves, one at a time, and what
    has to come after each. The training thread calls all methods, on all ranks together.
    """

    trained: TrainedEngine | None = None
    """The present or last training, whose state is saved."""

    def __init__(self, config: ZenFlowConfig) -> None:
        self.config = config
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []
        # By size: memory of the save before, used again, since new memory takes four times as long to write, and of the present one.
        self._before, self._present = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Of a copy: a training, and its thread, belong to this process."""
        return Checkpoints, (self.config,)

    def begin(self, trained: TrainedEngine, strategy: Strategy) -> None:
        """Begins a training of a strategy, whose `timeout` limits the threads' waits for each other."""
        self.trained = trained
        if trained.zenflow.async_checkpoints:
            # A group of their own: the training thread's collectives have another order on every rank.
            self._group = dist.new_group(backend="gloo", timeout=strategy._timeout)
            self._thread, self._ranks_on_host = ThreadPoolExecutor(1, "zenflow-save"), strategy.num_processes

    def end(self, *, together: bool) -> None:
        """Ends the thread behind `wait`, whose errors it raises; `together` is false behind an error, when the ranks end alone."""
        thread, self._thread = self._thread, None
        if thread is None or (self.trained is not None and self.trained.training.is_elsewhere):
            return
        # Otherwise training ends with another error, and the thread has logged this one.
        with nullcontext() if together else suppress(Exception):
            try:
                self.wait(together=together)
            finally:
                self._before.clear()
                thread.shutdown()
                if dist.is_initialized():
                    dist.destroy_process_group(self._group)

    def is_one_file(self, *, world_size: int) -> bool:
        """Whether a checkpoint with states is one file (`ZenFlowConfig.checkpoint_format`)."""
        format_ = self.config.checkpoint_format
        return format_ == "lightning" or (format_ == "auto" and world_size == 1)

    def refuse_folder(self, path: Any, io: CheckpointIO) -> None:
        """Raises MisconfigurationException if a checkpoint that is a folder cannot be written here."""
        if plugin_of(io) is not None or isinstance(place_of(path), str):
            raise MisconfigurationException(
                f"checkpoint_format must be 'lightning', one file, for checkpoints in {path} by {type(io).__name__}, got"
                f" {self.config.checkpoint_format!r}: folders, the default on several ranks, need a local path and no plugin"
            )

    def behind(self, call: Callable[[], None]) -> bool:
        """Calls a function after the save that is under way, if that succeeds; False: none is, which is the same on all ranks."""
        if self._thread is not None and self._under_way:
            save = self._under_way[0]
            self._under_way.append(self._thread.submit(lambda: call() if save.exception() is None else None))
        return bool(self._under_way)

    def wait(self, *, together: bool = True) -> None:
        """Waits for the save that is under way; each save begins so. OSError if it, or what was to come behind it, has failed, on this rank
        or, with `together`, when all ranks call it, on another one.
        """
        wait(self._under_way)
        ended, self._under_way = self._under_way, []
        if self._present:
            self._before, self._present = self._present, defaultdict(list)
        error = next((error for future in ended if (error := future.exception()) is not None), None)
        if ended and together:
            raise_together(error, OSError)
        elif error is not None:
            raise error

    def check(self) -> None:
        """Raises what `wait` does if the save has ended on all ranks, which call it together."""
        if self._under_way and all_agree(all(future.done() for future in self._under_way)):
            self.wait()

    def save(self, path: Any, source: Source, io: CheckpointIO, storage_options: Any, *, at_once: bool = False) -> None:
        """Saves the exact state after the last step, atomically; an existing checkpoint is replaced. With `at_once` it is there at the end
        of the call, whatever `async_checkpoints` says; a plugin of the user's, which alone reads `storage_options`, decides itself when it
        writes. OSError if the save failed, and the checkpoint before is as it was; or the one before, in the background, and this one is
        made.
        """
        if isinstance(source, FolderSource):
            self.refuse_folder(path, io)
        place = place_of(path)
        if (writer := io_of(place, io)) is None and storage_options is not None:
            raise TypeError(f"storage_options must be None without a plugin that reads them, got {storage_options!r}")
        put = None if writer is None else lambda content: writer.save_checkpoint(content, path, storage_options)
        before: OSError | None = None
        try:
            self.wait()
        except OSError as error:
            before = error
        if (trained := self.trained) is not None:
            trained.training.flush()
            if not in_common([trained.training.steps.number]):
                raise WorkerError(
                    "an exception has interrupted the ranks in different steps: no state is exact; continue from the last checkpoint"
                )
        released = {} if trained is None else trained.released
        # A file has the parameters as they are after training, DeepSpeed's code needs its own attributes of them.
        with (
            pickled_as_before(released),
            nullcontext() if isinstance(source, FileSource) else as_in_training(released),
        ):
            thread = None if at_once or plugin_of(io) is not None else self._thread
            self._save_together(place if put is None else str(path), source, put, thread)
        if before is not None:
            raise before

    def _save_together(
        self, path: Path | str, source: Source, put: _Put | None, thread: ThreadPoolExecutor | None
    ) -> None:
        """Gathers, writes and commits a checkpoint at rank 0's `path`. `thread`, if there is one, finishes the save behind this call."""
        staged: StagedSave | None = None
        state = source.state if isinstance(source, FolderSource) else source
        with ExitStack() as ending:
            with _saving(path):
                if dist.get_rank() == 0 and isinstance(path, Path):
                    staged = StagedSave(path, sync=self.config.sync_checkpoints, is_file=isinstance(source, FileSource))
                    ending.callback(staged.abandon)
            places: list[Any] = [path if staged is None else staged.content, path]
            dist.broadcast_object_list(places, src=0)
            place, path = places
            # Not in the checkpoint, where network storage gives an open file another name; of a store where all such files are.
            disk = DiskCopies(path.parent if isinstance(path, Path) else Path(tempfile.gettempdir()))
            ending.callback(disk.close)
            # Gather.
            with _saving(path):
                if isinstance(source, FolderSource) and not place.is_dir():
                    raise OSError(f"{place}, which rank 0 has made, is not there: all nodes must share the storage")
                if state is not None:
                    state.reserve(disk)
            # Write, or copy what is to be written.
            with nullcontext() if state is None else state.gathered(), _saving(path):
                left = [self._write(file, disk, put, copies=thread is not None) for file in source.files(place)]
            last = ending.pop_all()

        def commit() -> None:
            group = None if thread is None else self._group
            with last:
                with _saving(path, group):
                    for write_copy in filter(None, left):
                        write_copy()
                    if self.config.sync_checkpoints and isinstance(place, Path):
                        # Each rank its own, since network storage keeps what has been written with the host that wrote it.
                        sync_all(place.glob(f"*/*zero_pp_rank_{dist.get_rank()}_mp_rank_*"))
                with _saving(path, group):
                    if staged is not None:
                        staged.commit()

        if thread is None:
            commit()
        else:
            self._start(thread, commit)

    def _start(self, thread: ThreadPoolExecutor, finish: Callable[[], None]) -> None:
        # torch's settings for files are variables of the context.
        self._under_way.append(thread.submit(copy_context().run, finish))
        # At once, too: the training thread raises the error at its next save or flush only.
        self._under_way[0].add_done_callback(_log_error)

    def _write(
        self, file: FileContent, disk: DiskCopies, put: _Put | None, *, copies: bool
    ) -> Callable[[], None] | None:
        """Writes a file, or copies what it has at present for the thread; returns what is left to do there."""
        content, path, write = file
        # To a store Lightning writes as `torch.save`.
        if copies and (write is torch.save or put is not None) and (archive := self.copied(content, disk)) is not None:
            return partial(archive.write, partial(open, path, "wb") if put is None else partial(_in_store, path))
        if put is not None:
            put(content)
        else:
            with open(path, "wb") as opened:
                write(content, opened)
        return None

    def copied(self, content: Any, on_disk: DiskCopies) -> "Archive | None":
        """What `torch.save` would write of `content` at present; None where host memory has no room for a copy of its tensors. Tensors in
        `on_disk`, which this save has copied already, stay where they are.
        """
        sizes: dict[int, int] = {}
        for tensor in (leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)):
            # A sparse one has none.
            with suppress(Exception):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = 0 if on_disk.has(storage.data_ptr()) else storage.nbytes()
        new = Counter(sizes.values()) - Counter({n_bytes: len(kept) for n_bytes, kept in self._before.items()})
        needed, free = self._ranks_on_host * sum(new.elements()), free_host_memory()
        if needed > free.n_bytes:
            _log.warning(
                f"ZenFlow: async_checkpoints: a copy of what a file has needs {needed / 2**30:.2f} GiB of host memory for"
                f" {self._ranks_on_host} rank(s), but {free.n_bytes / 2**30:.2f} GiB are available ({free.limit}): training waits until the"
                " file is written"
            )
            return None
        archive = Archive(partial(self._copy_of, on_disk))
        _save(content, archive, pickle, DEFAULT_PROTOCOL, False)  # type: ignore[no-untyped-call]
        return archive

    def _copy_of(self, on_disk: DiskCopies, storage: UntypedStorage) -> UntypedStorage:
        n_bytes = storage.nbytes()
        if n_bytes == 0 or on_disk.has(storage.data_ptr()):
            return storage
        kept = self._before[n_bytes]
        self._present[n_bytes].append(kept.pop() if kept else new_pages(n_bytes))
        return self._present[n_bytes][-1].untyped_storage().copy_(storage)


def _log_error(save: Future[None]) -> None:
    if (error := save.exception()) is not None:
        _log.error("ZenFlow: %s", error)


class Archive:
    """The records of a file of torch, which are written later. `torch.save` takes it for its `torch._C.PyTorchFileWriter`."""

    def __init__(self, copy_of: Callable[[UntypedStorage], UntypedStorage]) -> None:
        self._copy_of = copy_of
        self._records: list[tuple[str, Any, int]] = []

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
        """As torch's method."""
        self._records.append((name, self._copy_of(data) if isinstance(data, UntypedStorage) else data, n_bytes))

    def write(self, opened: Callable[[], AbstractContextManager[Any]]) -> None:
        """Writes all to the file that `opened` makes."""
        with opened() as file, _open_zipfile_writer(file) as writer:
            for record in self._records:
                writer.write_record(*record)


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
