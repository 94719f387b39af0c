"""Saves in the background: a thread writes them from copies in host memory while training goes on."""

import logging
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, UntypedStorage

# Private: what `torch.save` consists of, and what finds the tensors in nested containers.
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save
from torch.utils._pytree import tree_leaves

from lightning_zenflow.core.process import all_agree, new_pages, raise_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.worker.machine import free_host_memory

_log = logging.getLogger(__name__)


class BackgroundSaves:
    """Saves of one rank that a thread finishes, one at a time, and what has to come after each. The training thread calls all methods.
    `timeout` limits the threads' waits for each other; None: torch's default.
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

    def start(self, finish: Callable[..., None]) -> None:
        """Begins a save, after `wait`; all ranks call it together. The thread calls `finish`, with the group of its collectives."""
        assert not self._under_way
        # torch's settings for files are variables of the context.
        self._under_way.append(self._thread.submit(copy_context().run, finish, group=self._group))
        # At once, too: the training thread raises the error at its next save or flush only.
        self._under_way[0].add_done_callback(_log_error)

    def behind(self, call: Callable[[], None]) -> None:
        """Calls a function after the save that is under way, if that succeeds."""
        save = self._under_way[0]
        self._under_way.append(self._thread.submit(lambda: call() if save.exception() is None else None))

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

    def close(self, *, together: bool) -> None:
        """Ends the thread behind `wait`, whose errors it raises."""
        try:
            self.wait(together=together)
        finally:
            self._thread.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group(self._group)


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
