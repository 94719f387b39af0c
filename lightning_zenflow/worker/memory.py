"""Memory of the host: what is free, the check before training that the arenas of all ranks fit, what the kernel has killed for lack of it;
and the release of the worker's socket and the arena in forked children, such as the processes of a data loader.

The kernel allocates shared memory when a page is first written. Without the check, a host with too little memory would fail later, by the
OOM killer.

A descriptor in a child keeps the memory allocated and hides the trainer's death from the worker. `MADV_DONTFORK` excludes the mapping from
children, and `O_CLOEXEC` closes descriptors in programs that a child executes; this module covers the time between fork and exec.

Where the mapping was, the kernel puts memory of the child's own. The Python object of the mapping must therefore never be freed there: it
would unmap that memory. A child's collection of garbage would free it if the trainer of an earlier fit is garbage.
"""

import contextlib
import ctypes
import logging
import math
import mmap
import os
import socket
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_zenflow.worker.cores import control_groups, read_file, read_table

_log = logging.getLogger(__name__)

_ROOT = Path("/")

HOST_MEMORY = "LIGHTNING_ZENFLOW_HOST_GIB"
"""Environment variable: host memory in GiB that the arenas of this host's ranks may take, whatever the kernel says; ``inf`` checks nothing.
For virtual machines that get more memory when they use it, where MemAvailable says too little."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Host memory that can still be allocated."""

    n_bytes: float
    limit: str
    """Name of the limit, for messages."""


def free_host_memory() -> FreeMemory:
    """Least free memory of the machine and of this process' control groups; infinite if unknown.

    Raises:
        ValueError: the environment variable `HOST_MEMORY`, which overrides both, is not a number above 0.
    """
    given = os.environ.get(HOST_MEMORY)
    if given is None:
        unknown = FreeMemory(n_bytes=math.inf, limit="unknown")
        return min(_free_memory(_ROOT), key=lambda free: free.n_bytes, default=unknown)
    try:
        gib = float(given)
    except ValueError:
        gib = math.nan
    if not gib > 0:
        raise ValueError(
            f"{HOST_MEMORY} must be a number of GiB above 0, or inf, got {given!r}; unset it or correct it"
        )
    return FreeMemory(n_bytes=gib * 2**30, limit=HOST_MEMORY)


def check_host_memory(*, first: int, largest: int, ranks: int, keys: str) -> str | None:
    """Checks that the arenas of this host's ranks fit; warns if they fit only at first.

    Args:
        first: bytes of one rank's arena at the start.
        largest: bytes with the largest S and d of "auto"; the difference to `first` is allocated when it is needed.
        ranks: number of ranks on this host.
        keys: keys that determine the sizes, with their values, for messages.

    Returns:
        An error message, or None.
    """
    free = free_host_memory()
    if math.isinf(free.n_bytes):
        return None
    available = f"but {_gib(int(free.n_bytes))} are available ({free.limit})"
    advice = (
        f"use smaller values of {keys}, down to 12 bytes per parameter for master weights and moments, 8 with"
        " moments_dtype='bfloat16', 6.1 with 'int8', or more hosts;"
        f" where the kernel is wrong, as on virtual machines that grow with use, {HOST_MEMORY} says how much there is"
    )
    if ranks * first > free.n_bytes:
        return (
            f"ZenFlow needs {_gib(ranks * first)} of host memory for the optimizer states and gradients of {ranks} rank(s) on this host,"
            f" {available}; {advice}"
        )
    if ranks * largest > free.n_bytes:
        needs = f"ZenFlow may need {_gib(ranks * largest)} of host memory for {ranks} rank(s) on this host"
        _log.warning("%s, %s; %s", needs, available, advice)
    return None


def _free_memory(root: Path) -> Iterator[FreeMemory]:
    machine = read_table(root / "proc/meminfo")
    if "MemAvailable:" in machine:
        yield FreeMemory(n_bytes=1024 * machine["MemAvailable:"], limit="MemAvailable of the machine")
    for group in control_groups(root):
        limit, usage = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and usage is not None:
            statistics = read_table(group / "memory.stat")
            # The page cache, which the kernel reclaims on demand.
            cache = statistics.get("inactive_file", 0) + statistics.get("active_file", 0)
            n_bytes = max(0, limit - max(0, usage - cache))
            yield FreeMemory(n_bytes=n_bytes, limit=f"control group limit {group / 'memory.max'}")


def _number(path: Path) -> int | None:
    text = read_file(path)
    return int(text) if text.isdigit() else None


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB ({n_bytes} bytes)"


class OutOfMemoryKills:
    """Counts the processes that the kernel's out-of-memory killer has ended, in this process' control groups and on the machine."""

    def __init__(self) -> None:
        self._seen = _counts(_ROOT)

    def since_last(self) -> str | None:
        """A sentence if there were any since the last call or the construction: where, and what to do; None if there were none."""
        now, before = _counts(_ROOT), self._seen
        self._seen = now
        for where, count in now.items():
            if count > before.get(where, 0):
                return (
                    f"The kernel's out-of-memory killer ended {count - before.get(where, 0)} process(es) meanwhile, says {where}: host"
                    " memory is too small. Use moments_dtype='bfloat16' or 'int8', smaller update_interval, publish_lag or"
                    " max_update_interval, fewer processes of data loaders, or give the job more memory"
                )
        return None


def _counts(root: Path) -> dict[str, int]:
    """Kills so far, by the file that says so: the nearest control group first, the machine last."""
    # With the kills of descendants.
    files = [*(folder / "memory.events" for folder in control_groups(root)), root / "proc/vmstat"]
    return {str(path): table["oom_kill"] for path in files if "oom_kill" in (table := read_table(path))}


MEMORY_PREFIX = "zenflow-"
"""Prefix of the names of this package's memfds."""

_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()

_mappings: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def keep_from_children(connection: socket.socket) -> None:
    """Closes a socket in every child that is forked from now on, for the lifetime of the socket object."""
    _connections.add(connection)


def exclude_from_children(memory: mmap.mmap) -> None:
    """Leaves a mapping out of every child that is forked from now on, where its object stays without memory."""
    memory.madvise(mmap.MADV_DONTFORK)
    _mappings.add(memory)


def _release() -> None:
    for memory in list(_mappings):
        # A reference for ever; one in a variable would go when the child's interpreter ends, and with it the child's memory.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    for connection in list(_connections):
        connection.close()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of the listed folder itself no longer exists.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{MEMORY_PREFIX}"):
                # Replaced instead of closed: Python objects in the child would close the number again, after its reuse.
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_release)
