"""This process among others: the ranks of its training, children that are forked from it, and its trainings, which may overlap, in several
threads too, and end in any order.

*Ranks* agree on errors, so that none waits for a rank that has left, and on what is possible.

*Forked children*, such as the processes of a data loader, inherit neither the arena and copies of weights, nor the worker's socket, nor
the files of a save that is under way: a descriptor in a child keeps memory or disk space, and hides the trainer's death from the worker.
Where an excluded mapping was, the kernel puts memory of the child's own. The Python object of the mapping must therefore never be freed
there: it would unmap that memory. Nor does a child collect the garbage that it inherits: the destructor of Gloo's process group, which is
part of an earlier fit's, would wait for threads that the child does not have.
"""

import ctypes
import gc
import mmap
import os
import re
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

MEMORY_PREFIX = "zenflow-"
"""Prefix of the names of this package's memfds."""

SAVING = ".zenflow-saving"
"""Suffix of the directory in which a checkpoint is written."""

_OURS = re.compile(rf"/memfd:{MEMORY_PREFIX}|.*/\.[0-9a-f.]+{re.escape(SAVING)}/")
"""Files whose descriptors no child keeps."""

_LIMIT_S = 1800.0
"""Of the wait for another thread: torch's own of a collective."""

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""By which ranks find each other: Lightning's launcher and DeepSpeed set them for a training and leave them behind."""

kept_from_children: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Sockets that are closed in every child that is forked from now on, for the lifetime of the socket objects."""

_mappings: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()
_set_up = threading.RLock()
_inherited: dist.ProcessGroup | None = None


def world_size() -> int:
    """Number of ranks; 1 where `torch.distributed` is not in use."""
    return dist.get_world_size() if dist.is_initialized() else 1


def in_common(values: Sequence[T]) -> list[T]:
    """Values that every rank has, in the order of this rank. A collective."""
    of_rank: list[Sequence[T]] = [values] * world_size()
    if len(of_rank) > 1:
        dist.all_gather_object(of_rank, values)
    common = set(values).intersection(*of_rank)
    return [value for value in values if value in common]


def all_agree(flag: bool) -> bool:
    """True if a flag is set on every rank. A collective."""
    return bool(in_common([flag] if flag else []))


def raise_together(
    error: BaseException | None, kind: Callable[[str], Exception], group: dist.ProcessGroup | None = None
) -> None:
    """Raises an exception on every rank if any rank has an error: `error`, where there is one; elsewhere `kind` of the message of the first
    rank with one. A collective.
    """
    messages: list[str | None] = [None] * world_size()
    if len(messages) > 1:
        dist.all_gather_object(messages, None if error is None else str(error), group=group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise kind(f"rank {rank}: {message}")


@contextmanager
def raising_together(kind: Callable[[str], Exception], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context whose error is raised on every rank, as by `raise_together`: a collective, with no other collective inside."""
    try:
        yield
    except Exception as error:
        # Raises; where the exchange itself fails, this error is in the traceback as well.
        raise_together(error, kind, group)
    else:
        raise_together(None, kind, group)


def exclude_from_children(memory: mmap.mmap) -> None:
    """Leaves a mapping out of every child that is forked from now on, where its object stays without memory."""
    memory.madvise(mmap.MADV_DONTFORK)
    _mappings.add(memory)


def new_pages(n_bytes: int) -> Tensor:
    """[n_bytes] uint8 on the CPU, zeros in memory pages of their own, which are left out of children; the kernel gives them when they are
    first written. `n_bytes` is above 0.
    """
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    exclude_from_children(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def refuse_inherited_group() -> None:
    """Refuses collectives in a process that was forked from one with a process group, whose threads it does not have."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise RuntimeError(
            "this process was forked from one with a process group of torch.distributed, as a training leaves it, whose threads it does not"
            " have: call `torch.distributed.destroy_process_group()` before the fork, or start processes by 'spawn' instead of 'fork'"
        )


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Context of a set-up or an end, which change names of DeepSpeed and torch; other threads wait."""
    lock = _set_up
    if not lock.acquire(timeout=_LIMIT_S):
        raise RuntimeError(
            f"another training of this process has been set up or ended for {_LIMIT_S:g} s, in another thread, and DeepSpeed does one at a"
            " time; run them one after the other, or each in a process of its own"
        )
    try:
        yield
    finally:
        lock.release()


class PutBack:
    """A value of the process, or of each thread, that trainings change: the end of the last one puts back what the first one has found."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], *, of_thread: bool = False) -> None:
        self._read, self._write, self._of_thread = read, write, of_thread
        # By thread.
        self._trainings: defaultdict[int, set[object]] = defaultdict(set)
        self._found: dict[int, Any] = {}
        # The garbage collector may end a training within each call.
        self._lock = threading.RLock()

    def begin(self) -> Callable[[], None]:
        """Notes a training; what is returned ends that, and may be called again."""
        thread, training = threading.get_ident() if self._of_thread else 0, object()
        with self._lock:
            # First, so that none that ends meanwhile is the last.
            self._trainings[thread].add(training)
            if thread not in self._found:
                self._found[thread] = self._read()
        return partial(self._end, thread, training)

    def _end(self, thread: int, training: object) -> None:
        with self._lock:
            self._trainings[thread].discard(training)
            if not self._trainings[thread] and thread in self._found:
                self._write(self._found.pop(thread))


def _write_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


variables = PutBack(lambda: {name: os.environ.get(name) for name in _VARIABLES}, _write_variables)
threads = PutBack(torch.get_num_threads, torch.set_num_threads, of_thread=True)


def _after_fork() -> None:
    global _inherited, _set_up
    _inherited, _set_up = dist.group.WORLD, threading.RLock()
    gc.freeze()
    for memory in list(_mappings):
        # A reference for ever; one in a variable would go when the child's interpreter ends, and with it the child's memory.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    for connection in list(kept_from_children):
        connection.close()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of the listed folder itself no longer exists.
        with suppress(OSError):
            if _OURS.match(os.readlink(f"/proc/self/fd/{name}")):
                # Replaced instead of closed: Python objects in the child would close the number again, after its reuse.
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_after_fork)
