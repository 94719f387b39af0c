"""Releases the worker's socket and the arena's memory in forked children, such as the processes of a data loader.

A descriptor in a child keeps the memory allocated and hides the trainer's death from the worker. `MADV_DONTFORK` excludes the mapping from
children, and `O_CLOEXEC` closes descriptors in programs that a child executes; this module covers the time between fork and exec.
"""

import contextlib
import os
import socket
import weakref

MEMORY_PREFIX = "zenflow-"
"""Prefix of the names of this package's memfds."""

_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def keep_from_children(connection: socket.socket) -> None:
    """Closes a socket in every child that is forked from now on, for the lifetime of the socket object."""
    _connections.add(connection)


def _release() -> None:
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
