"""Releases the worker's socket and the arena's memory in forked children, such as the processes of a data loader.

A descriptor in a child keeps the memory allocated and hides the trainer's death from the worker. `MADV_DONTFORK` excludes the mapping from
children, and `O_CLOEXEC` closes descriptors in programs that a child executes; this module covers the time between fork and exec.

Where the mapping was, the kernel puts memory of the child's own. The Python object of the mapping must therefore never be freed there: it
would unmap that memory. A child's collection of garbage would free it if the trainer of an earlier fit is garbage.
"""

import contextlib
import ctypes
import mmap
import os
import socket
import weakref

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
