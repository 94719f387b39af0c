"""Runs cases of `harness` on several ranks. Run as a script it is one rank of such a run (see `run_on_ranks`)."""

import os
import socket
import subprocess
import sys
import tempfile
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


def run_on_ranks(
    cases: dict[str, Case],
    *,
    ranks: int = 2,
    timeout_s: float = 270,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[Run]]:
    """Runs cases one after the other on several ranks (gloo), all of them in one set of processes, since starting them takes seconds.

    Args:
        cases: by name.
        ranks: how many.
        timeout_s: for all of them.
        environment: variables of the processes, beside those of this one.

    Returns:
        For each case the ranks' runs; the optimizer state is the joint one. A case that failed holds the traceback in `Run.error`, and so
        do the cases after it, which did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(cases, Path(folder) / "cases.pt")
        port = free_port()
        processes = []
        for rank in range(ranks):
            # What Lightning's own launcher sets for the processes that it starts.
            variables = {
                **os.environ,
                **(environment or {}),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            with open(Path(folder) / f"output{rank}.txt", "wb") as output:
                command = [sys.executable, __file__, folder, str(ranks)]
                processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        try:
            for process in processes:
                process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pass  # the missing results say so
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return {name: _collect(Path(folder), name, case, ranks) for name, case in cases.items()}


def _collect(folder: Path, name: str, case: Case, ranks: int) -> list[Run]:
    runs, partitions = [], []
    for rank in range(ranks):
        path = folder / f"{name}.{rank}.pt"
        if path.exists():
            run, of_rank = torch.load(path, weights_only=False)
        else:
            output = (folder / f"output{rank}.txt").read_text(errors="replace")
            run, of_rank = Run(error=f"rank {rank} left no result; its output ends with:\n{output[-4000:]}"), []
        runs.append(run)
        partitions.append(of_rank)
    if all(run.error is None for run in runs):
        for run in runs:
            join_partitions(case, run, partitions)
    return runs


def main(folder: Path, ranks: int) -> None:
    """One rank: runs all cases, writes what happened to files."""
    torch.set_num_threads(1)
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
        if result[0].error:
            # The other rank may be anywhere by now: going on would leave it waiting.
            os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
