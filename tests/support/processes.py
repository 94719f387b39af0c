"""Processes: whether they are alive, waiting until they are or are not, and what memory they share."""

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def workers() -> list[int]:
    """Process numbers of this process' workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        # Others end in between.
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process.pid] if "zenflow-worker" in process.name() else []
    return found


def end_workers() -> list[int]:
    """Kills this process' workers; which there were."""
    left = workers()
    for pid in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            process.wait(10)
    return left


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
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
        self._fd = os.dup(strategy.zenflow_optimizer.training.parts.rank.arena.fd)

    @property
    def n_bytes(self) -> int:
        """Of all processes that share it."""
        return 512 * os.fstat(self._fd).st_blocks

    def close(self) -> None:
        os.close(self._fd)


def open_files() -> Iterator[tuple[int, str]]:
    """Descriptors of this process, and what each is open for."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            yield int(fd), os.readlink(f"/proc/self/fd/{fd}")


@contextlib.contextmanager
def leaves_no_file_open() -> Iterator[None]:
    """What is open after the block was open before it.

    Garbage of earlier tests may hold descriptors, and a collection in the block may close them: garbage is collected first, and a
    file that is closed meanwhile is no failure. What the block opens it closes without a collection, or collects itself.
    """
    gc.collect()
    before = Counter(name for _, name in open_files())
    yield
    more = Counter(name for _, name in open_files()) - before
    assert not more, f"left open: {dict(more)}"


def arena_mappings() -> list[tuple[int, int]]:
    """Addresses [begin, end) of the arenas that this process has mapped, open or closed."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "zenflow-arena" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def shared_bytes() -> int:
    """Shared memory of ours that this process holds."""
    sizes = {}
    for fd, name in open_files():
        if "memfd:zenflow-" in name:
            status = os.fstat(fd)
            sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())
