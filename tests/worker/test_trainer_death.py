"""No process, shared memory, socket or thread is left, however the process that trains ends."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from benchmarks.common.processes import fresh_environment
from processes import is_alive, wait_for

_SCRIPT = Path(__file__).parents[1] / "support" / "dying_trainer.py"


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass
class Trainer:
    """A process of `dying_trainer`."""

    output: TextIO

    def __post_init__(self) -> None:
        self.pid = int(self.line())

    def line(self) -> str:
        """What it prints next, but for what libraries print."""
        for line in self.output:
            if re.fullmatch(r"\d+|\d+ workers, \d+ bytes", line.strip()):
                return line.strip()
        raise AssertionError("it has ended")


@pytest.fixture
def no_worker_is_left() -> None:
    """Here all trainers run while each is looked at."""


@pytest.fixture(scope="module")
def trainers() -> Iterator[dict[signal.Signals | str, Trainer]]:
    """A trainer for each signal, with two loaders, and one under Fabric."""
    # The loop first: of its pipe, no process that is forked later holds an end.
    pipes = {how: os.pipe() for how in ("loop", *SIGNALS)}
    written = [write for _, write in pipes.values()]
    arguments = [f"{'loop' if how == 'loop' else 'fit'}:{write}" for how, (_, write) in pipes.items()]
    command = [sys.executable, str(_SCRIPT), *arguments]
    parent = subprocess.Popen(
        command, pass_fds=written, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=fresh_environment(),
        start_new_session=True,
    )  # fmt: skip
    for write in written:
        os.close(write)
    with contextlib.ExitStack() as opened:
        outputs = {how: opened.enter_context(open(read)) for how, (read, _) in pipes.items()}
        yield {how: Trainer(output) for how, output in outputs.items()}
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def holders(pids: set[int]) -> list[str]:
    """Processes among the given ones that hold memory of ours, by descriptor or mapping."""
    found = []
    for pid in pids:
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            maps, command = (Path(f"/proc/{pid}/{name}").read_text() for name in ("maps", "cmdline"))
        except OSError:  # gone meanwhile
            continue
        if any("memfd:zenflow-" in link for link in links) or "memfd:zenflow-" in maps:
            found.append(f"{pid}: {command}")
    return found


@pytest.mark.parametrize("how", SIGNALS)
def test_a_killed_trainer(how: signal.Signals, trainers: dict[signal.Signals | str, Trainer]) -> None:
    """Worker and memory are gone before Python takes itself apart, and at once where it has no time for that. Loaders may live on."""
    trainer = trainers[how]
    worker = int(trainer.line())
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
        assert trainer.line() == "0 workers, 0 bytes"
    wait_for(lambda: not is_alive(worker))
    wait_for(lambda: not holders(family | {trainer.pid}))
    if how == signal.SIGKILL:
        assert all(is_alive(loader) for loader in loaders)
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)


def test_a_loop_that_tears_nothing_down_ends_cleanly(trainers: dict[signal.Signals | str, Trainer]) -> None:
    trainer = trainers["loop"]
    worker = int(trainer.line())
    printed = trainer.output.read()
    assert "Traceback" not in printed and "Exception ignored" not in printed, printed
    wait_for(lambda: not is_alive(worker))
