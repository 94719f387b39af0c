"""A script that Lightning, torchrun or SLURM starts. Two nodes, which are this machine: one is killed, training goes on with the other."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.processes import fresh_environment
from harness import Case, run_here
from node_trainer import KEYS, SAVED_AT
from processes import is_alive, wait_for
from rank_processes import free_port

SCRIPT = Path(__file__).parents[1] / "support" / "node_trainer.py"
CASE = Case(model_options={"ranks_differ": False}, steps=2 * SAVED_AT, strategy_options=KEYS)
ENDLESS = str(10**6)


class Tasks:
    """Processes of a training over several nodes, each with an output file, in a folder that they write to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, launcher: Sequence[str], *arguments: str, **variables: str) -> None:
        """Starts `node_trainer` by a launcher, in a session of its own."""
        environment = fresh_environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path), **variables)
        command = [*launcher, str(SCRIPT), str(self.folder), *arguments]
        with open(self.folder / f"output{len(self.processes)}.txt", "wb") as output:
            options = {"env": environment, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.processes.append(subprocess.Popen(command, **options))  # type: ignore[call-overload]

    def output(self, index: int) -> str:
        return (self.folder / f"output{index}.txt").read_text()

    def saved(self, ranks: int) -> list[int]:
        """Waits until all ranks have saved; returns their process numbers."""
        files = [self.folder / f"{rank}.pid" for rank in range(ranks)]
        wait_for(lambda: all(f.exists() for f in files) or any(p.poll() is not None for p in self.processes), 400)
        assert all(f.exists() for f in files), [self.output(i) for i in range(len(self.processes))]
        return [int(f.read_text()) for f in files]

    def fails(self, index: int) -> None:
        """Waits for the end of a process, by an error of the communication."""
        assert self.processes[index].wait(200) != 0
        assert "gloo" in self.output(index)

    def end(self) -> None:
        ranks = [int(f.read_text()) for f in self.folder.glob("*.pid")]
        for pid in [*ranks, *(p.pid for p in self.processes if p.poll() is None)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    tasks = Tasks(tmp_path)
    yield tasks
    tasks.end()


def torchrun(*, nodes: int, node: int, port: int) -> list[str]:
    options = [f"--nnodes={nodes}", f"--node-rank={node}", "--nproc-per-node=2", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", "--master-addr=127.0.0.1", *options]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["Lightning", "SLURM"])
def test_a_script_on_two_ranks(launcher: str, tasks: Tasks) -> None:
    """Slurm itself is not here, but the variables that `srun` sets for each task are; its tasks are on two nodes."""
    port, nodes = free_port(), 2 if launcher == "SLURM" else 1
    for node in range(nodes):
        variables = {"MASTER_PORT": str(port), "NODES": str(nodes), "DEVICES": str(2 // nodes)}
        if launcher == "SLURM":
            names = {"JOB_ID": 1234, "JOB_NAME": "train", "NODELIST": "127.0.0.1", "NNODES": 2, "NTASKS": 2}
            names |= {"NTASKS_PER_NODE": 1, "NODEID": node, "LOCALID": 0, "PROCID": node}
            variables |= {f"SLURM_{name}": str(value) for name, value in names.items()}
        tasks.start([sys.executable], str(CASE.steps), "", **variables)
    assert [process.wait(240) for process in tasks.processes] == [0] * nodes, tasks.output(0)
    _, ranks, steps, weights = torch.load(tasks.folder / "result.pt")
    assert (ranks, steps) == (2, CASE.steps)
    torch.testing.assert_close(weights, run_here(replace(CASE, loop="direct")).weights, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_node_is_killed(tasks: Tasks, tmp_path: Path) -> None:
    """The other one ends by itself, and then goes on alone from the checkpoint, as one rank without interruption."""
    port = free_port()
    for node in range(2):
        tasks.start(torchrun(nodes=2, node=node, port=port), ENDLESS, "", NODES="2", DEVICES="2")
    pids = tasks.saved(ranks=4)
    for pid in (tasks.processes[0].pid, *pids[:2]):
        os.kill(pid, signal.SIGKILL)
    tasks.fails(1)
    wait_for(lambda: not any(map(is_alive, pids)))

    alone, rest = Tasks(tmp_path / "alone"), (str(CASE.steps), str(tmp_path / "saved.ckpt"))
    alone.start(torchrun(nodes=1, node=0, port=free_port()), *rest, NODES="1", DEVICES="2")
    try:
        assert alone.processes[0].wait(400) == 0, alone.output(0)
    finally:
        alone.end()
    environment, ranks, steps, weights = torch.load(alone.folder / "result.pt")
    assert (environment, ranks, steps) == ("TorchElasticEnvironment", 2, CASE.steps)
    # Sums over ranks have another order.
    torch.testing.assert_close(weights, run_here(replace(CASE, loop="direct")).weights, rtol=0, atol=2e-6)
