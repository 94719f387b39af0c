"""Saves that go on while training does: what a checkpoint's files have is copied to host memory, from which a thread writes them.

A second process would need memory that both share. `UncachedFile` takes a quarter of the processor time of an ordinary file, most of it for
torch's checksums. The thread pauses instead of having a low priority, which does not count for the disk and holds up who waits for it.
"""

import copy
import errno
import fcntl
import io
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_zenflow.core.distributed import all_agree
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies
from lightning_zenflow.worker.machine import allowed_cores, cpu_limit, free_host_memory

_log = logging.getLogger(__name__)

_BYTES_PER_CORE_S = 20e6
"""Bytes per second and allowed core that are written while no call waits: 4 % of the cores where a virtual disk takes 2 s of a core per GB,
most of it in its host, which no clock here counts.
"""

_LONGEST_PAUSES_S = 300.0
"""From the start of a save, after which it goes at full speed, as other ranks may wait for this one; at most a quarter of their limit."""

_CHUNK_BYTES = 2**20
"""Copied at once, under Python's lock."""

_PIECE_BYTES = 2**24
"""Written at once."""


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
        # Whether a call waits for the thread; when its last pause ended, and when they all end.
        self._is_awaited, self._awake, self._last_pause = threading.Event(), 0.0, 0.0
        # Private: an interpreter that ends waits for the thread before it calls what `atexit` has.
        threading._register_atexit(self._is_awaited.set)  # type: ignore[attr-defined]
        self._rate = _BYTES_PER_CORE_S * min(len(allowed_cores()), cpu_limit()) / ranks_on_host
        self._longest_pauses_s = min(_LONGEST_PAUSES_S, (timeout or default_pg_timeout).total_seconds() / 4)
        # By the place of the original: copies of the save before, whose memory is used again, and of the present one. Memory that is new
        # takes four times as long to write.
        self._before: dict[Any, Tensor] = {}
        self._present: dict[Any, Tensor] = {}

    def copied(self, content: Any, on_disk: DiskCopies) -> Any:
        """A copy of what a file has at present; None where host memory has no room for one.

        Args:
            content: what the file has.
            on_disk: copies that this save has made already.
        """
        with _HostCopies(on_disk, self._before, self._present) as copies:
            copied = copy.deepcopy(content)
        needed, free = self._ranks_on_host * copies.n_new_bytes, free_host_memory()
        if needed > free.n_bytes:
            _log.warning(
                "ZenFlow: async_checkpoints: a copy of what a file has needs %.2f GiB of host memory for %d rank(s), but %.2f GiB are"
                " available (%s): training waits until the file is written",
                *(needed / 2**30, self._ranks_on_host, free.n_bytes / 2**30, free.limit),
            )
            return None
        copies.fill()
        return copied

    def start(self, finish: Callable[..., None]) -> None:
        """Begins a save, after `wait`; all ranks call it together.

        Args:
            finish: writes this rank's files and gives the checkpoint its name, in the thread; `group` is for its collectives.
        """
        assert not self._under_way
        self._is_awaited.clear()
        self._awake = time.monotonic()
        self._last_pause = self._awake + self._longest_pauses_s
        self._under_way.append(self._thread.submit(finish, group=self._group))
        # At once, too: the training thread raises the error at its next save or flush only.
        self._under_way[0].add_done_callback(_log_error)

    def pause(self, n_bytes: int) -> None:
        """In the thread, behind a write: sleeps for as long as the write has to take, unless a call or another rank waits for the save."""
        self._is_awaited.wait(min(self._awake + n_bytes / self._rate, self._last_pause) - time.monotonic())
        self._awake = time.monotonic()

    def behind(self, call: Callable[[], None]) -> None:
        """Calls a function: at once, or after the save that is under way, if that succeeds."""
        if not self._under_way:
            call()
        else:
            save = self._under_way[0]
            self._under_way.append(self._thread.submit(lambda: call() if save.exception() is None else None))

    def wait(self) -> None:
        """Waits for the save that is under way; each save begins so. All ranks call it together.

        Raises:
            OSError: the save has failed, on this rank or on another one.
        """
        self._is_awaited.set()
        wait(self._under_way)
        if self._present:
            self._before, self._present = self._present, {}
        ended, self._under_way = self._under_way, []
        for future in ended:
            future.result()

    def check(self) -> None:
        """Raises what `wait` does if the save has ended on all ranks, which call it together."""
        if self._under_way and all_agree(self._under_way[0].done()):
            self.wait()

    def close(self) -> None:
        """Waits, and ends the thread.

        Raises:
            OSError: as of `wait`.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group(self._group)


def _log_error(save: Future[None]) -> None:
    if (error := save.exception()) is not None:
        _log.error("ZenFlow: %s", error)


class _HostCopies(TorchFunctionMode):
    """Context in which `copy.deepcopy` gives tensors host memory, each of the size that the tensor spans, and equal ones once; `fill` then
    copies what they have.

    Tensors that are more than a view of a storage, and `torch.nn.Parameter`, are copied at once where they are. What this save has copied
    to disk stays.

    Args:
        on_disk: copies that this save has made already.
        before: copies of the save before, by the place of the original; those that are used again are taken out.
        present: those of this save.

    Attributes:
        n_new_bytes: bytes of memory that is not of the save before.
    """

    def __init__(self, on_disk: DiskCopies, before: dict[Any, Tensor], present: dict[Any, Tensor]) -> None:
        super().__init__()
        self._on_disk, self._before, self._present = on_disk, before, present
        self._to_fill: dict[Any, tuple[Tensor, Tensor]] = {}
        self.n_new_bytes = 0

    def fill(self) -> None:
        for key, (memory, original) in self._to_fill.items():
            self._present[key] = memory.copy_(original)

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = function is Tensor.__deepcopy__
        if not is_copy:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        is_view = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj())
        if not is_view or is_traceable_wrapper_subclass(tensor):
            return function(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = self._copy_of(tensor)
        return memo[id(tensor)]

    def _copy_of(self, tensor: Tensor) -> Tensor:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        numel = 1 + sum((n - 1) * stride for n, stride in sizes) if tensor.numel() else 0
        spanned = tensor.detach().as_strided((numel,), (1,))
        if self._on_disk.has(spanned.data_ptr()):
            return tensor
        key = spanned.device, spanned.data_ptr(), spanned.dtype, numel
        # Not in `_present`: where nothing holds an original that was copied, another one may be in its place.
        if key not in self._to_fill:
            if (memory := self._before.pop(key, None)) is None:
                memory = new_pages(numel, spanned.dtype)
                self.n_new_bytes += memory.nbytes
            self._to_fill[key] = memory, spanned
        memory, _ = self._to_fill[key]
        copied = memory.as_strided(tensor.shape, tensor.stride())
        return copied.requires_grad_(tensor.requires_grad).as_subclass(type(tensor))


def new_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] on the CPU, which begins with a page. The kernel gives the memory when it is written first."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, dtype.itemsize * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


@contextmanager
def uncached(path: Any, pause: Callable[[int], None]) -> Iterator["UncachedFile"]:
    """Context with an `UncachedFile`, in which this thread's `torch.save` has each storage begin with a page of the file."""
    aligned: AbstractContextManager[Any] = nullcontext()
    # Not in torch 2.6.
    with suppress(ImportError):
        from torch.utils.serialization import config

        if hasattr(config.save, "storage_alignment"):
            aligned = config.patch({"save.storage_alignment": mmap.PAGESIZE})  # type: ignore[attr-defined]  # torch adds it to the module
    with aligned, UncachedFile(path, pause) as file:
        yield file


class UncachedFile(io.FileIO):
    """A new file that is written past the page cache: to fill that, and to write its pages to the disk, would take cores from training.

    What begins with a page, in memory (`new_pages`) and in the file (`uncached`), is written from where it is; all else is copied first.

    Args:
        path: path of the file.
        pause: called behind each write, with its bytes.
    """

    def __init__(self, path: Any, pause: Callable[[int], None]) -> None:
        super().__init__(path, "wb")
        self._pause = pause
        self._chunk = mmap.mmap(-1, _CHUNK_BYTES)
        # File systems in memory refuse.
        with suppress(OSError):
            fcntl.fcntl(self, fcntl.F_SETFL, os.O_DIRECT)

    @override
    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        n_bytes = left.nbytes
        if n_bytes >= _CHUNK_BYTES and self._chunk.tell() % mmap.PAGESIZE == 0:
            self._write_chunk()
            n_rest = n_bytes % mmap.PAGESIZE
            left = left[n_bytes - n_rest - self._write_out(left[: n_bytes - n_rest]).nbytes :]
        while left:
            left = left[self._chunk.write(left[: _CHUNK_BYTES - self._chunk.tell()]) :]
            if self._chunk.tell() == _CHUNK_BYTES:
                self._write_chunk()
        return n_bytes

    @override
    def flush(self) -> None:
        # The rest may end within a page.
        fcntl.fcntl(self, fcntl.F_SETFL, 0)
        self._write_chunk()

    def _write_chunk(self) -> None:
        left = memoryview(self._chunk)[: self._chunk.tell()]
        self._chunk.seek(0)
        if left := self._write_out(left):
            # Not even a chunk has the right length, or a part of one was written, so that the rest has not.
            fcntl.fcntl(self, fcntl.F_SETFL, 0)
            self._write_out(left)

    def _write_out(self, left: memoryview) -> memoryview:
        """Writes memory; returns what the file system refuses to write past the page cache."""
        try:
            while left:
                n_bytes = super().write(left[:_PIECE_BYTES])
                left = left[n_bytes:]
                self._pause(n_bytes)
        except OSError as error:
            is_direct = fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT
            if not is_direct or error.errno not in (errno.EFAULT, errno.EINVAL, errno.ENOTSUP):
                raise
        return left
