"""However training ends: no process, shared memory, socket or thread of ours is left, whoever else goes on living."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import fresh_environment
from processes import is_alive, wait_for

_SCRIPT = Path(__file__).with_name("dying_trainer.py")


@pytest.fixture
def trainers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], how: str, *, n_loaders: int = 0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), how, str(n_loaders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=fresh_environment(),
        text=True,
    )
    started.append(process)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    """What it prints next, but for what libraries print."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().isdigit() or line.strip() == "through":
            return line.strip()
    raise AssertionError(f"it ended with status {process.wait()}")


def holders(pids: set[int]) -> list[str]:
    """Processes among the given ones that hold memory of ours, by descriptor or mapping."""
    found = []
    for pid in pids:
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # gone meanwhile
            continue
        if any("memfd:zenflow-" in link for link in links) or "memfd:zenflow-" in maps:
            found.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()}")
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_trainer(how: signal.Signals, trainers: list[subprocess.Popen[str]]) -> None:
    """With two loaders, which live on where the trainer cannot end them. On an idle machine nothing is left after some 20 ms."""
    trainer = start(trainers, "waits", n_loaders=2)
    worker = int(line_of(trainer))
    family = {process.pid for process in psutil.Process(trainer.pid).children(recursive=True)}
    loaders = family - {worker}
    assert len(loaders) >= 2
    assert holders(loaders) == []
    assert len(holders({worker, trainer.pid})) == 2
    if how == signal.SIGKILL:
        # They would notice after a few seconds; what they held would be free then in any case.
        for loader in loaders:
            os.kill(loader, signal.SIGSTOP)
    os.kill(trainer.pid, how)
    wait_for(lambda: not is_alive(worker))
    wait_for(lambda: not holders(family | {trainer.pid}))
    if how == signal.SIGKILL:
        assert all(is_alive(loader) for loader in loaders)
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)


@pytest.mark.parametrize("how", ["error", "trainer"])
def test_a_fit_that_ends_early(how: str, trainers: list[subprocess.Popen[str]]) -> None:
    """A second fit works, in the same process, and leaves nothing but itself."""
    trainer = start(trainers, how)
    first = int(line_of(trainer))
    while (line := line_of(trainer)) != "through":
        assert int(line) != first
    assert not is_alive(first)
    assert psutil.Process(trainer.pid).children(recursive=True) == []
