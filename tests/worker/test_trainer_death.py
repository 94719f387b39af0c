"""No process, shared memory, socket or thread is left, however training ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.common.processes import fresh_environment
from processes import is_alive, wait_for

_SCRIPT = Path(__file__).parents[1] / "support" / "dying_trainer.py"


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def trainers() -> Iterator[dict[signal.Signals | None, subprocess.Popen[str]]]:
    """A trainer for each signal, with two loaders, and one whose fits end early; started together to save time."""
    started = {**{how: start("waits", n_loaders=2) for how in SIGNALS}, None: start("error,stops,end")}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def start(ways: str, *, n_loaders: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(_SCRIPT), ways, str(n_loaders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=fresh_environment(),
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    """What it prints next, but for what libraries print."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.fullmatch(r"\d+|through|\d+ workers, \d+ bytes", line.strip()):
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


@pytest.mark.parametrize("how", SIGNALS)
def test_a_killed_trainer(how: signal.Signals, trainers: dict[signal.Signals | None, subprocess.Popen[str]]) -> None:
    """Worker and memory are gone before Python takes itself apart, and at once where it has no time for that. Loaders may live on."""
    trainer = trainers[how]
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
    if how != signal.SIGKILL:
        assert line_of(trainer) == "0 workers, 0 bytes"
    wait_for(lambda: not is_alive(worker))
    wait_for(lambda: not holders(family | {trainer.pid}))
    if how == signal.SIGKILL:
        assert all(is_alive(loader) for loader in loaders)
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)


def test_fits_that_end_early(trainers: dict[signal.Signals | None, subprocess.Popen[str]]) -> None:
    """By an error and by a callback; another one works in the same process, and none leaves anything."""
    trainer = trainers[None]
    workers = [int(line_of(trainer)) for _ in range(3)]
    assert len(set(workers)) == 3
    assert line_of(trainer) == "through"
    assert not any(map(is_alive, workers))
    assert psutil.Process(trainer.pid).children(recursive=True) == []
