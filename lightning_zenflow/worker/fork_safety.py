"""What a forked child, such as a data loader's process, must not keep of its parent: the arena's memory and the worker's connection.

A descriptor that the child holds keeps the memory and hides the trainer's death from the worker. The mapping itself is left out of
children by `MADV_DONTFORK`, and programs that a child executes inherit nothing by `O_CLOEXEC`; this is about the time in between.
"""

import contextlib
import os
import socket
import weakref

MEMORY_PREFIX = "zenflow-"
"""Of the names of all memfds of this package."""

_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def keep_from_children(connection: socket.socket) -> None:
    """Closes a socket in every child that is forked from now on, as long as it exists."""
    _connections.add(connection)


def _let_go() -> None:
    for connection in list(_connections):
        connection.close()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        # The folder's own descriptor is gone by now.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{MEMORY_PREFIX}"):
                # Not closed: Python's objects in the child still know the number, and would close what gets it next.
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
