"""Runs cases of `harness` on several ranks, each a fork of a process that has everything imported."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.compile_fx  # else imported by the first fit of every fork
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from harness import Case, Run, join_partitions, run_case

free_port = find_free_network_port

# Importing takes longer than most cases do, so the process that forks is there for later calls too.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([Path(__file__).stem])


def run_on_ranks(cases: dict[str, Case], *, ranks: int = 2, timeout_s: float = 270) -> dict[str, list[Run]]:
    """Runs cases one after the other on several ranks (gloo).

    Args:
        cases: by name.
        ranks: how many.
        timeout_s: for all of them.

    Returns:
        For each case the ranks' runs; the optimizer state is the joint one. A case that `fails` holds the traceback in `Run.error`.

    Raises:
        AssertionError: another case failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port, deadline = free_port(), time.monotonic() + timeout_s
        processes = [_FORKS.Process(target=_run_rank, args=(cases, folder, rank, ranks, port)) for rank in range(ranks)]
        # Of the process that forks. One that has initialised CUDA must not.
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", **variables):
            for process in processes:
                process.start()
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
            # What is missing then says so itself.
            process.kill()
        runs = {name: _collect(folder, name, case, ranks) for name, case in cases.items()}
    for name, case in cases.items():
        for rank, run in enumerate(runs[name]):
            assert case.fails or run.error is None, f"{name}, rank {rank}: {run.error}"
    return runs


def _collect(folder: Path, name: str, case: Case, ranks: int) -> list[Run]:
    runs, partitions = [], []
    for rank in range(ranks):
        path = folder / f"{name}.{rank}.pt"
        if path.exists():
            run, of_rank = torch.load(path, weights_only=False)
        else:
            output = (folder / f"output{rank}.txt").read_text(errors="replace")[-4000:]
            run, of_rank = Run(error=f"rank {rank} left no result; its output ends with:\n{output}"), []
        runs.append(run)
        partitions.append(of_rank)
    if all(run.error is None for run in runs):
        for run in runs:
            join_partitions(case, run, partitions)
    return runs


def _run_rank(cases: dict[str, Case], folder: Path, rank: int, ranks: int, port: int) -> None:
    """One rank: runs the cases, writes what happened to files in a folder."""
    output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(output, fd)
    torch.set_num_threads(1)
    # What Lightning's own launcher sets for the processes that it starts.
    variables = {
        "LOCAL_RANK": rank,
        "NODE_RANK": 0,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
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
