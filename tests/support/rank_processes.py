"""Runs cases of `harness` on several ranks, each a fork of a process that has everything imported, which this file is as a script."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch._inductor.compile_fx  # else imported by the first fit of every fork

from harness import Case, Run, join_partitions, run_case


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class _ForkServer:
    """A process that forks ranks. Importing takes longer than most cases do, so it is there for later calls too."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        variables = {
            **os.environ,
            **environment,
            "OMP_NUM_THREADS": "1",
            # Pickled cases name functions of test modules, whose folders pytest has put on the path.
            "PYTHONPATH": os.pathsep.join(sys.path),
            # A process that has initialised CUDA must not fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, folder: Path, ranks: int, timeout_s: float) -> None:
        """Runs the cases in a folder, until every rank has ended; what is missing then says so itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), ranks, free_port()]) + "\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while not (folder / "ended").exists() and self.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        if not (folder / "ended").exists():
            self.end()

    def end(self) -> None:
        """Its ranks as well."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


_present: list[_ForkServer] = []
"""At most one."""


@atexit.register
def _end_present() -> None:
    while _present:
        _present.pop().end()


def fork_server(environment: Mapping[str, str] | None = None) -> _ForkServer:
    """The present one, or a new one, which imports what it needs while the caller goes on."""
    if _present and (_present[0].environment != dict(environment or {}) or not _present[0].alive):
        _end_present()
    if not _present:
        _present.append(_ForkServer(environment or {}))
    return _present[0]


def run_on_ranks(
    cases: dict[str, Case],
    *,
    ranks: int = 2,
    timeout_s: float = 270,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[Run]]:
    """Runs cases one after the other on several ranks (gloo).

    Args:
        cases: by name.
        ranks: how many.
        timeout_s: for all of them.
        environment: variables of the processes, beside those of this one.

    Returns:
        For each case the ranks' runs; the optimizer state is the joint one. A case that `fails` holds the traceback in `Run.error`.

    Raises:
        AssertionError: another case failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(cases, folder / "cases.pt")
        fork_server(environment).run(folder, ranks, timeout_s)
        runs = {name: _collect(folder, name, case, ranks) for name, case in cases.items()}
    for name, case in cases.items():
        for rank, run in enumerate(runs[name]):
            assert case.fails or run.error is None, f"{name}, rank {rank}: {run.error}"
    return runs


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output{rank}.txt"


def _collect(folder: Path, name: str, case: Case, ranks: int) -> list[Run]:
    runs, partitions = [], []
    for rank in range(ranks):
        path = folder / f"{name}.{rank}.pt"
        if path.exists():
            run, of_rank = torch.load(path, weights_only=False)
        else:
            output = _output(folder, rank).read_text(errors="replace")[-4000:]
            run, of_rank = Run(error=f"rank {rank} left no result; its output ends with:\n{output}"), []
        runs.append(run)
        partitions.append(of_rank)
    if all(run.error is None for run in runs):
        for run in runs:
            join_partitions(case, run, partitions)
    return runs


def _run_rank(folder: Path, rank: int, ranks: int, port: int) -> None:
    """One rank: runs the cases in a folder, writes what happened to files there."""
    output = os.open(_output(folder, rank), os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # What Lightning's own launcher sets for the processes that it starts.
    variables = {
        "LOCAL_RANK": rank,
        "NODE_RANK": 0,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    cases: dict[str, Case] = torch.load(folder / "cases.pt", weights_only=False)
    for name, case in cases.items():
        try:
            result = run_case(case, devices=ranks)
        except BaseException:
            result = Run(error=traceback.format_exc()), []
        temporary = folder / f"{name}.{rank}.tmp"
        torch.save(result, temporary)
        temporary.rename(folder / f"{name}.{rank}.pt")
        if result[0].error and not case.fails:
            # The other rank may be anywhere by now: going on would leave it waiting.
            return


def main() -> None:
    """Forks the ranks that it is asked for until there is nothing more to come."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, ranks, port = json.loads(line)
        children = []
        for rank in range(ranks):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    _run_rank(Path(folder), rank, ranks, port)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)
        (Path(folder) / "ended").touch()


if __name__ == "__main__":
    main()
