"""Saves that go on while training does: what a checkpoint's files have is copied to host memory, from which a thread writes them.

A second process would need memory that both share. A thread does not slow training down: torch writes storages without Python's lock.
"""

import copy
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_zenflow.core.distributed import all_agree
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies
from lightning_zenflow.worker.machine import free_host_memory

_log = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19
"""Of Linux' scheduler: training and the worker come first."""

Write = Callable[[Any], None]
"""Writes what one file of a checkpoint has."""


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
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "zenflow-save", initializer=_come_last)
        self._under_way: list[Future[None]] = []
        # By the place of the original: copies of the save before, whose memory is used again, and of the present one. Memory that is new
        # takes four times as long to write.
        self._before: dict[Any, Tensor] = {}
        self._present: dict[Any, Tensor] = {}

    def copied(self, content: Any, write: Write, on_disk: DiskCopies) -> Callable[[], None]:
        """A call that writes what a file has at present; where host memory has no room for a copy, the file is written at once.

        Args:
            content: what the file has.
            write: writes the file.
            on_disk: copies that this save has made already.
        """
        copies = self._before, self._present
        with (counting := _HostCopies(on_disk, copies, only_counts=True)):
            copy.deepcopy(content)
        needed, free = self._ranks_on_host * counting.n_bytes, free_host_memory()
        if needed > free.n_bytes:
            _log.warning(
                "ZenFlow: async_checkpoints: a copy of what a file has needs %.2f GiB of host memory for %d rank(s), but %.2f GiB are"
                " available (%s): training waits until the file is written",
                *(needed / 2**30, self._ranks_on_host, free.n_bytes / 2**30, free.limit),
            )
            write(content)
            return _nothing
        with _HostCopies(on_disk, copies):
            return partial(write, copy.deepcopy(content))

    def start(self, finish: Callable[[], None], ending: ExitStack) -> None:
        """Begins a save, after `wait`; all ranks call it together.

        Args:
            finish: writes this rank's files and gives the checkpoint its name, in the thread.
            ending: closed at the end, whatever happens.
        """
        assert not self._under_way
        self._under_way.append(self._thread.submit(_finish, finish, ending))

    def behind(self, call: Callable[[], None]) -> None:
        """Calls a function: at once, or after the save that is under way, if that succeeds."""
        if not self._under_way:
            call()
        else:
            self._under_way.append(self._thread.submit(_unless_failed, self._under_way[0], call))

    def wait(self) -> None:
        """Waits for the save that is under way; each save begins so. All ranks call it together.

        Raises:
            OSError: the save has failed, on this rank or on another one.
        """
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
                dist.destroy_process_group(self.group)


def _nothing() -> None:
    """The rest of a file that has been written."""


def _come_last() -> None:
    # Under Linux, of a thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _finish(finish: Callable[[], None], ending: ExitStack) -> None:
    with ending:
        try:
            finish()
        except Exception as error:
            # At once, too: the training thread raises the error at its next save or flush only.
            _log.error("ZenFlow: %s", error)
            raise


def _unless_failed(save: Future[None], call: Callable[[], None]) -> None:
    if save.exception() is None:
        call()


class _HostCopies(TorchFunctionMode):
    """Context in which `copy.deepcopy` copies tensors to host memory, each with the memory that the tensor spans, and equal ones once.

    Tensors that are more than a view of a storage, and `torch.nn.Parameter`, are copied where they are. What this save has copied to disk
    stays.

    Args:
        on_disk: copies that this save has made already.
        copies: by the place of the original, those of the save before and of this one.
        only_counts: nothing is copied.

    Attributes:
        n_bytes: bytes of new memory.
    """

    def __init__(
        self, on_disk: DiskCopies, copies: tuple[dict[Any, Tensor], dict[Any, Tensor]], *, only_counts: bool = False
    ) -> None:
        super().__init__()
        self._on_disk, self._only_counts = on_disk, only_counts
        self._before, self._present = copies
        self._counted: dict[Any, int] = {}

    @property
    def n_bytes(self) -> int:
        return sum(self._counted.values())

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
            memo[id(tensor)] = self._copied(tensor)
        return memo[id(tensor)]

    def _copied(self, tensor: Tensor) -> Tensor:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        numel = 1 + sum((n - 1) * stride for n, stride in sizes) if tensor.numel() else 0
        spanned = tensor.detach().as_strided((numel,), (1,))
        if self._on_disk.has(spanned.data_ptr()):
            return tensor
        key = spanned.device, spanned.data_ptr(), spanned.dtype, numel
        if self._only_counts:
            if key not in self._before and key not in self._present:
                self._counted[key] = spanned.nbytes
            return tensor
        if key not in self._present:
            memory = self._before.get(key)
            self._present[key] = spanned.to("cpu", copy=True) if memory is None else memory.copy_(spanned)
        copied = self._present[key].as_strided(tensor.shape, tensor.stride())
        return copied.requires_grad_(tensor.requires_grad).as_subclass(type(tensor))
