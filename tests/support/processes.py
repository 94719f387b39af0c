"""Processes: whether they are alive, waiting until they are or are not, and what memory they share."""

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
        """Whoever uses it."""
        return 512 * os.fstat(self._fd).st_blocks

    def close(self) -> None:
        os.close(self._fd)
