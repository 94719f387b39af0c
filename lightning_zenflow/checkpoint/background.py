"""Saves that go on while training does: what `torch.save` would write at the call is copied to host memory, from which a thread writes it.

A second process would need memory that both share.
"""

import logging
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, UntypedStorage

# Private: what `torch.save` consists of.
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save
from typing_extensions import override

from lightning_zenflow.core.process import all_agree, new_pages, raise_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.worker.machine import free_host_memory

_log = logging.getLogger(__name__)


class BackgroundSaves:
    """Saves of one rank that a thread finishes, at most one at a time, and what has to come after a save.

    The training thread calls all methods.

    Args:
        ranks_on_host: number of ranks that save at the same time into this host's memory.
        timeout: limit of the threads' waits for each other; None: torch's default.
    """

    def __init__(self, *, ranks_on_host: int, timeout: timedelta | None) -> None:
        self._ranks_on_host = ranks_on_host
        # A group of their own: the training thread's collectives have another order on every rank.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "zenflow-save")
        self._under_way: list[Future[None]] = []
        # By size: memory of the save before, which is used again, and of the present one. Memory that is new takes four times as long to
        # write.
        self._before, self._present = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)

    @property
    def is_under_way(self) -> bool:
        """Whether there is a save whose end nothing has waited for; the same on all ranks."""
        return bool(self._under_way)

    def copied(self, content: Any, on_disk: DiskCopies) -> "Archive | None":
        """What `torch.save` would write at present; None where host memory has no room for a copy.

        Args:
            content: what the file has.
            on_disk: copies that this save has made already, which stay where they are.
        """
        sizes: dict[int, int] = {}

        class Pickler(pickle.Pickler):
            @override
            def reducer_override(self, obj: Any) -> Any:
                if isinstance(obj, Tensor):
                    # What has no storage of its own, as a sparse tensor, consists of tensors that have one.
                    with suppress(Exception):
                        storage = obj.untyped_storage()
                        sizes[storage.data_ptr()] = 0 if on_disk.has(storage.data_ptr()) else storage.nbytes()
                return NotImplemented

            @override
            def dump(self, obj: Any) -> None:
                super().dump(obj)
                refuse_lack(sizes.values())

        refuse_lack, archive = self._refuse_lack, Archive(partial(self._copy_of, on_disk))
        try:
            _save(content, archive, SimpleNamespace(Pickler=Pickler), DEFAULT_PROTOCOL, False)  # type: ignore[no-untyped-call]
        except MemoryError as lack:
            _log.warning("ZenFlow: async_checkpoints: %s: training waits until the file is written", lack)
            return None
        return archive

    def _refuse_lack(self, sizes: Iterable[int]) -> None:
        """Raises MemoryError where there is no room for copies of these sizes, before the first is made."""
        new = Counter(sizes) - Counter({n_bytes: len(kept) for n_bytes, kept in self._before.items()})
        needed, free = self._ranks_on_host * sum(new.elements()), free_host_memory()
        if needed > free.n_bytes:
            raise MemoryError(
                f"a copy of what a file has needs {needed / 2**30:.2f} GiB of host memory for {self._ranks_on_host} rank(s), but"
                f" {free.n_bytes / 2**30:.2f} GiB are available ({free.limit})"
            )

    def _copy_of(self, on_disk: DiskCopies, storage: UntypedStorage) -> UntypedStorage:
        n_bytes = storage.nbytes()
        if n_bytes == 0 or on_disk.has(storage.data_ptr()):
            return storage
        kept = self._before[n_bytes]
        self._present[n_bytes].append(kept.pop() if kept else new_pages(n_bytes))
        return self._present[n_bytes][-1].untyped_storage().copy_(storage)

    def start(self, finish: Callable[..., None]) -> None:
        """Begins a save, after `wait`; all ranks call it together.

        Args:
            finish: writes this rank's files and gives the checkpoint its name, in the thread; `group` is for its collectives.
        """
        assert not self._under_way
        # torch's settings for files are variables of the context.
        self._under_way.append(self._thread.submit(copy_context().run, finish, group=self._group))
        # At once, too: the training thread raises the error at its next save or flush only.
        self._under_way[0].add_done_callback(_log_error)

    def behind(self, call: Callable[[], None]) -> None:
        """Calls a function after the save that is under way, if that succeeds."""
        save = self._under_way[0]
        self._under_way.append(self._thread.submit(lambda: call() if save.exception() is None else None))

    def wait(self) -> None:
        """Waits for the save that is under way; each save begins so. All ranks call it together.

        Raises:
            OSError: the save, or what was to come behind it, has failed, on this rank or on another one.
        """
        was_under_way, error = self.is_under_way, self._end()
        if was_under_way:
            raise_together(error, OSError)

    def _end(self) -> BaseException | None:
        """Waits, and returns an error of this rank."""
        wait(self._under_way)
        errors = [future.exception() for future in self._under_way]
        self._under_way = []
        if self._present:
            self._before, self._present = self._present, defaultdict(list)
        return next((error for error in errors if error is not None), None)

    def check(self) -> None:
        """Raises what `wait` does if the save has ended on all ranks, which call it together."""
        if self._under_way and all_agree(all(future.done() for future in self._under_way)):
            self.wait()

    def close(self, *, together: bool) -> None:
        """Waits, and ends the thread.

        Args:
            together: whether all ranks call it together.

        Raises:
            OSError: as of `wait`.
        """
        try:
            if together:
                self.wait()
            elif (error := self._end()) is not None:
                raise error
        finally:
            self._thread.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group(self._group)


def _log_error(save: Future[None]) -> None:
    if (error := save.exception()) is not None:
        _log.error("ZenFlow: %s", error)


class Archive:
    """The records of a file of torch, which are written later. `torch.save` takes it for its `torch._C.PyTorchFileWriter`.

    Args:
        copy_of: copies a storage.
    """

    def __init__(self, copy_of: Callable[[UntypedStorage], UntypedStorage]) -> None:
        self._copy_of = copy_of
        self._records: list[tuple[str, Any, int]] = []

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
        """As torch's method."""
        self._records.append((name, self._copy_of(data) if isinstance(data, UntypedStorage) else data, n_bytes))

    def write(self, file: Any) -> None:
        """Writes all to an open file."""
        with _open_zipfile_writer(file) as writer:
            for record in self._records:
                writer.write_record(*record)
