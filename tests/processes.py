"""Other processes: the environment they start in, whether they are alive, and waiting until they are or are not."""

import os
import time
from collections.abc import Callable

import psutil


def fresh_environment(**variables: str) -> dict[str, str]:
    """This process' environment and some variables, for a process that trains by itself.

    Fits in this process leave their rendezvous behind: its port is taken, and with its rank Lightning would wait for others to start.
    """
    rendezvous = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {**{key: value for key, value in os.environ.items() if key not in rendezvous}, **variables}


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Waits until `condition()` is true. The timeout only ends a test that has failed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
