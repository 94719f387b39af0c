"""What children that are forked, such as the processes of a data loader, do not inherit: the arena and copies of weights, the worker's
socket, and the files of a save that is under way.

A descriptor in a child keeps memory or disk space, and hides the trainer's death from the worker. `MADV_DONTFORK` excludes a
mapping from children, and `O_CLOEXEC` closes descriptors in programs that a child executes; this module covers the time between fork and
exec. Where the mapping was, the kernel puts memory of the child's own. The Python object of the mapping must therefore never be freed
there: it would unmap that memory.

Nor does a child collect the garbage that it inherits, such as the trainer of an earlier fit. The destructor of Gloo's process group, which
is part of that garbage, would wait for threads that the child does not have.
"""

import ctypes
import gc
import mmap
import os
import re
import socket
import weakref
from contextlib import suppress

import torch
from torch import Tensor

MEMORY_PREFIX = "zenflow-"
"""Prefix of the names of this package's memfds."""

SAVING = ".zenflow-saving"
"""Suffix of the directory in which a checkpoint is written."""

_OURS = re.compile(rf"/memfd:{MEMORY_PREFIX}|.*/\.[0-9a-f.]+{re.escape(SAVING)}/")
"""Files whose descriptors no child keeps."""

kept_from_children: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Sockets that are closed in every child that is forked from now on, for the lifetime of the socket objects."""

_mappings: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


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


def _release() -> None:
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


os.register_at_fork(after_in_child=_release)
