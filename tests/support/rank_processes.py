"""Runs cases of `harness` on several ranks, each a fork of a process that has everything imported."""

import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx  # else imported by the first fit of every fork
from typing_extensions import override

from harness import Case, Run, join_partitions, run_case, run_here

# Importing takes longer than most cases do, so the process that forks is there for later calls too.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([Path(__file__).stem])


_TIMEOUT_S = 270
"""Of all cases of a call."""


def free_port() -> int:
    """A port that is free. Not one of those from 32768 on, which the system may give to a connection before the port is used."""
    while True:
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(20_000, 32_000)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


_FAILED = 3
"""Exit status of a rank that has ended with a case that should not have failed."""
_GRACE_S = 20
"""How long other ranks then have: they may have the same error, or wait for the rank that has ended."""


@dataclass(frozen=True)
class Runs(Mapping[str, list[Run]]):
    """What happened in each of many cases, a run a rank. Whoever asks for a case that has failed gets its error; others have theirs."""

    cases: Mapping[str, Case]
    runs: Mapping[str, list[Run]]

    @override
    def __getitem__(self, name: str) -> list[Run]:
        for rank, run in enumerate(self.runs[name]):
            assert self.cases[name].fails or run.error is None, f"{name}, rank {rank}: {run.error}"
        return self.runs[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.cases)

    @override
    def __len__(self) -> int:
        return len(self.cases)


def run_each(cases: dict[str, Case], *, ranks: int = 2, here: bool = True) -> Runs:
    """Runs cases one after the other, each whatever has become of the others, on several ranks (gloo), or on one (`here`: in this process).

    The optimizer state is the joint one. A case that `fails` holds the traceback in `Run.error`.
    """
    if ranks == 1 and here:
        return Runs(cases, {name: [_run_here(case)] for name, case in cases.items()})
    return Runs(cases, _run_in_processes(cases, ranks))


def run_on_ranks(cases: dict[str, Case], *, ranks: int = 2) -> dict[str, list[Run]]:
    """As `run_each`, not in this process; raises the error of a case that should not have failed."""
    return dict(run_each(cases, ranks=ranks, here=False))


def status_of_fork(act: Callable[..., object], *arguments: object) -> int | None:
    """Exit status of a process that does something and ends, with its threads, as a program does; None: not within `_TIMEOUT_S`."""
    process = _FORKS.Process(target=act, args=arguments)
    _start(process)
    process.join(_TIMEOUT_S)
    return process.exitcode


def run_functions(
    functions: Mapping[str, Callable[[], object]], folder: Path, *, ranks: int = 2
) -> dict[str, list[str]]:
    """Calls functions of a module on each rank (gloo), one after the other; `folder` is for their files. Returns their errors: one ends its
    rank, and later functions are not called.
    """
    _run_ranks(_call, ranks, time.monotonic() + _TIMEOUT_S, functions, folder)

    def error(path: Path) -> str:
        return path.read_text() if path.exists() else "it was not called, or did not end: one before has failed"

    return {name: [error(folder / f"{name}.{rank}.txt") for rank in range(ranks)] for name in functions}


def _call(rank: int, functions: Mapping[str, Callable[[], object]], folder: Path) -> None:
    os.environ["RANK"] = str(rank)
    os.chdir(folder)
    torch.distributed.init_process_group("gloo")
    for name, function in functions.items():
        try:
            function()
        except BaseException:
            Path(f"{name}.{rank}.txt").write_text(traceback.format_exc())
            sys.exit(_FAILED)
        Path(f"{name}.{rank}.txt").touch()
    torch.distributed.destroy_process_group()


def _run_here(case: Case) -> Run:
    try:
        return run_here(case)
    except Exception:
        return Run(error=traceback.format_exc())


def _run_in_processes(cases: dict[str, Case], ranks: int) -> dict[str, list[Run]]:
    """Behind a case that should not have failed, the ranks may be anywhere: the rest has processes of its own."""
    runs: dict[str, list[Run]] = {}
    deadline = time.monotonic() + _TIMEOUT_S
    while len(runs) < len(cases):
        rest = {name: case for name, case in cases.items() if name not in runs}
        with tempfile.TemporaryDirectory() as folder:
            _run_ranks(_run_cases, ranks, deadline, ranks, rest, Path(folder))
            for name, case in rest.items():
                runs[name] = _collect(Path(folder), name, case, ranks)
                has_failed = not case.fails and any(run.error is not None for run in runs[name])
                if has_failed and time.monotonic() < deadline:
                    break
    return runs


def _start(*processes: Any) -> None:
    # Of the process that forks. One that has initialised CUDA must not.
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", **variables):
        for process in processes:
            process.start()


def _run_ranks(run: Callable[..., None], ranks: int, deadline: float, *arguments: object) -> None:
    """Runs a function as each of the ranks, and waits; kills what is left at the end, or some time behind the first that has failed."""
    port = free_port()
    processes = [_FORKS.Process(target=_as_rank, args=(run, rank, ranks, port, *arguments)) for rank in range(ranks)]
    _start(*processes)
    try:
        while (left := deadline - time.monotonic()) > 0 and (
            running := [p.sentinel for p in processes if p.exitcode is None]
        ):
            wait(running, left)
            if any(p.exitcode == _FAILED for p in processes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    finally:
        for process in processes:
            # What is missing then says so itself.
            process.kill()
            process.join()


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


def _as_rank(run: Callable[..., None], rank: int, ranks: int, port: int, *arguments: object) -> None:
    """With what Lightning's own launcher sets for the processes that it starts."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
    run(rank, *arguments)


def _run_cases(rank: int, ranks: int, cases: dict[str, Case], folder: Path) -> None:
    """Writes what happened to files in a folder."""
    output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(output, fd)
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
            sys.exit(_FAILED)
