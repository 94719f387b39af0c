"""Runs cases of `harness` on several ranks. Run as a script it is one rank of such a run (see `run_on_ranks`)."""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from harness import Case, Run, join_partitions, run_case


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class _Ranks:
    """Processes, one a rank, that run whatever cases they are given. They end with this process, at the latest."""

    def __init__(self, ranks: int, environment: Mapping[str, str]) -> None:
        self.kind = (ranks, dict(environment))
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[str]] = []
        port = free_port()
        for rank in range(ranks):
            # What Lightning's own launcher sets for the processes that it starts.
            variables = {
                **os.environ,
                **environment,
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                # Pickled cases name functions of test modules, whose folders pytest has put on the path.
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            with open(self._output(rank), "wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(ranks)],
                        env=variables,
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def run(self, folder: Path, timeout_s: float) -> None:
        """Runs the cases in a folder, until every rank is through or has ended; what is missing then says so itself."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self._processes):
            while not _through(folder, rank).exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)

    def end_of_output(self, rank: int) -> str:
        return self._output(rank).read_text(errors="replace")[-4000:]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def _output(self, rank: int) -> Path:
        return Path(self._folder.name) / f"output{rank}.txt"


_present: list[_Ranks] = []
"""At most one: starting processes takes longer than most cases do, so they stay for later ones."""


@atexit.register
def _end_present() -> None:
    while _present:
        _present.pop().end()


def run_on_ranks(
    cases: dict[str, Case],
    *,
    ranks: int = 2,
    timeout_s: float = 270,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[Run]]:
    """Runs cases one after the other on several ranks (gloo), in processes that later calls use again.

    Args:
        cases: by name.
        ranks: how many.
        timeout_s: for all of them.
        environment: variables of the processes, beside those of this one.

    Returns:
        For each case the ranks' runs; the optimizer state is the joint one. A case that failed holds the traceback in `Run.error`, and so
        do the cases after it, which did not run, unless it `fails`.
    """
    if _present and (_present[0].kind != (ranks, dict(environment or {})) or not _present[0].alive):
        _end_present()
    if not _present:
        _present.append(_Ranks(ranks, environment or {}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(cases, folder / "cases.pt")
        _present[0].run(folder, timeout_s)
        runs = {name: _collect(folder, name, case, ranks) for name, case in cases.items()}
        if not all(_through(folder, rank).exists() for rank in range(ranks)):
            _end_present()
    return runs


def _through(folder: Path, rank: int) -> Path:
    """A file that a rank writes when all cases have been run."""
    return folder / f"through.{rank}"


def _collect(folder: Path, name: str, case: Case, ranks: int) -> list[Run]:
    runs, partitions = [], []
    for rank in range(ranks):
        path = folder / f"{name}.{rank}.pt"
        if path.exists():
            run, of_rank = torch.load(path, weights_only=False)
        else:
            output = _present[0].end_of_output(rank)
            run, of_rank = Run(error=f"rank {rank} left no result; its output ends with:\n{output}"), []
        runs.append(run)
        partitions.append(of_rank)
    if all(run.error is None for run in runs):
        for run in runs:
            join_partitions(case, run, partitions)
    return runs


def run_cases(folder: Path, ranks: int) -> None:
    """One rank: runs the cases in a folder, writes what happened to files there."""
    rank = int(os.environ["LOCAL_RANK"])
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
            os._exit(1)
    _through(folder, rank).touch()


def main(ranks: int) -> None:
    """One rank: runs what it is given until there is nothing more to come."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        run_cases(Path(line.strip()), ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]))
