"""Processes: whether they are alive, waiting until they are or are not, and what memory they share."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import psutil


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Waits until `condition()` is true. The timeout only ends a test that has failed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


class ArenaWatch:
    """Sees what memory this process' arena takes, after it has been closed too.

    Args:
        strategy: in a fit.
    """

    def __init__(self, strategy: Any) -> None:
        self._fd = os.dup(strategy.zenflow_optimizer.parts.rank.arena.fd)

    @property
    def n_bytes(self) -> int:
        """Of all processes that share it."""
        return 512 * os.fstat(self._fd).st_blocks

    def close(self) -> None:
        os.close(self._fd)


def shared_bytes() -> int:
    """Shared memory of ours that this process holds."""
    sizes = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            if "memfd:zenflow-" in os.readlink(f"/proc/self/fd/{fd}"):
                status = os.fstat(int(fd))
                sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())
