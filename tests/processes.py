"""Other processes: whether they are alive, and waiting until they are or are not."""

import time
from collections.abc import Callable

import psutil


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Waits until `condition()` is true. The timeout only ends a test that has failed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
