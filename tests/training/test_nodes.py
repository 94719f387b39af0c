"""Two nodes, which are this machine: one that is killed is named, and training goes on with the other; SLURM's variables."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from benchmarks.common.processes import fresh_environment
from harness import Case, run_here
from lightning_zenflow.zero import lost_ranks
from lightning_zenflow.zero.lost_ranks import LostRanks
from node_trainer import KEYS, SAVED_AT
from processes import is_alive, leaves_no_file_open, wait_for
from rank_processes import free_port, run_on_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "node_trainer.py"
CASE = Case(model_options={"ranks_differ": False}, steps=2 * SAVED_AT, strategy_options=KEYS)
ENDLESS = 10**6


@pytest.mark.parametrize("loop", ["trainer", pytest.param("fabric", marks=pytest.mark.slow)])
def test_the_error_names_the_rank_that_has_ended(loop: str) -> None:
    case = replace(CASE, model="LeavingModule", model_options={}, fails=True, loop=loop)
    stays, _ = run_on_ranks({"leaves": case})["leaves"]
    assert stays.error is not None
    assert "Lost: rank 1 of node 0 (host " in stays.error


@dataclass
class RankLeaves(pl.Callback):
    """Rank 1 ends; rank 0 sees an error of the communication and asks who is lost; rank 2 is busy until it has been answered."""

    explained: Path

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.barrier()
        with leaves_no_file_open():
            ranks = LostRanks(node=0)
        if trainer.global_rank == 1:
            os._exit(1)
        error = RuntimeError("gloo: connection closed by peer")
        if trainer.global_rank == 0:
            wait_for(lambda: not ranks._ranks[1].is_running())
            lost_ranks._END_S = lost_ranks._SETTLE_S = 0.0
            ranks.explain(error)
            self.explained.touch()
        else:
            wait_for(self.explained.exists)
        raise error


def test_a_busy_rank_is_not_lost_and_nothing_is_open_meanwhile(tmp_path: Path) -> None:
    case = replace(CASE, fails=True, callbacks=(RankLeaves(tmp_path / "explained"),))
    asking, _, _ = run_on_ranks({"leaves": case}, ranks=3)["leaves"]
    assert asking.error is not None
    assert re.search(r"\nLost: rank 1 of node 0 \(host [^)]*\)\. What", asking.error), asking.error


@dataclass
class Tasks:
    """Processes of a training over several nodes, each with an output file."""

    folder: Path

    def __post_init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, launcher: Sequence[str], steps: int, checkpoint: Path | str = "", **variables: str) -> None:
        """Starts `node_trainer` by a launcher, in a session of its own."""
        environment = fresh_environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path), **variables)
        with open(self.output(len(self.processes)), "wb") as output:
            self.processes.append(
                subprocess.Popen(
                    [*launcher, str(SCRIPT), str(self.folder), str(steps), str(checkpoint)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def output(self, index: int) -> Path:
        return self.folder / f"output{index}.txt"

    def saved(self, ranks: int) -> list[int]:
        """Waits until all ranks have saved; returns their process numbers."""
        files = [self.folder / f"{rank}.pid" for rank in range(ranks)]
        wait_for(lambda: all(f.exists() for f in files) or any(p.poll() is not None for p in self.processes), 400)
        assert all(f.exists() for f in files), [self.output(i).read_text() for i in range(len(self.processes))]
        return [int(f.read_text()) for f in files]

    def succeed(self) -> tuple[str, int, int, list[torch.Tensor]]:
        """Waits for all; returns environment, ranks, steps and weights."""
        for i, process in enumerate(self.processes):
            assert process.wait(400) == 0, self.output(i).read_text()
        result: tuple[str, int, int, list[torch.Tensor]] = torch.load(self.folder / "result.pt")
        return result

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


def assert_same_training(weights: Sequence[torch.Tensor]) -> None:
    """As one rank without interruption; sums over ranks have another order."""
    for a, b in zip(weights, run_here(CASE).weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_killed(lost: int, tasks: Tasks, tmp_path: Path) -> None:
    """The other one ends by itself and names it, and then goes on alone from the checkpoint."""
    port = free_port()
    for node in range(2):
        tasks.start(torchrun(nodes=2, node=node, port=port), ENDLESS, NODES="2", DEVICES="2")
    pids = tasks.saved(ranks=4)
    for pid in (tasks.processes[lost].pid, *pids[2 * lost : 2 * lost + 2]):
        os.kill(pid, signal.SIGKILL)
    left = 1 - lost
    assert tasks.processes[left].wait(200) != 0
    assert f"Lost: rank {2 * lost}, {2 * lost + 1} of node {lost} (host " in tasks.output(left).read_text()
    for pid in pids:
        wait_for(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]

    alone = Tasks(tmp_path / "alone")
    alone.folder.mkdir()
    alone.start(
        torchrun(nodes=1, node=0, port=free_port()), CASE.steps, tmp_path / "saved.ckpt", NODES="1", DEVICES="2"
    )
    try:
        environment, ranks, steps, weights = alone.succeed()
    finally:
        alone.end()
    assert (environment, ranks, steps) == ("TorchElasticEnvironment", 2, CASE.steps)
    assert_same_training(weights)


def slurm(task: int, *, port: int, tasks_of_nodes: int, host: str = "127.0.0.1") -> Mapping[str, str]:
    """What `srun` sets for a task of two nodes, of which the first is `host`."""
    node, local = divmod(task, tasks_of_nodes)
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": host,
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": str(2 * tasks_of_nodes),
        "SLURM_NTASKS_PER_NODE": str(tasks_of_nodes),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_PROCID": str(task),
        "MASTER_PORT": str(port),
        "NODES": "2",
        "DEVICES": str(tasks_of_nodes),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slurm_finds_two_nodes_with_two_tasks_each(tasks: Tasks) -> None:
    """Slurm itself is not here, but the variables that it sets for each task are."""
    port = free_port()
    for task in range(4):
        tasks.start([sys.executable], CASE.steps, **slurm(task, port=port, tasks_of_nodes=2))
    environment, ranks, steps, weights = tasks.succeed()
    assert (environment, ranks, steps) == ("SLURMEnvironment", 4, CASE.steps)
    assert_same_training(weights)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slurm_names_the_node_that_is_killed(tasks: Tasks) -> None:
    port = free_port()
    for task in range(2):
        tasks.start([sys.executable], ENDLESS, **slurm(task, port=port, tasks_of_nodes=1))
    pids = tasks.saved(ranks=2)
    os.kill(pids[1], signal.SIGKILL)
    assert tasks.processes[0].wait(200) != 0
    assert "Lost: rank 1 of node 1 (host " in tasks.output(0).read_text()


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them, `HOSTS[i]` at its end `CABLE` in namespace i."""
    names = [f"zenflow-{os.getpid()}-{node}" for node in range(2)]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{host}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)


HOSTS = ("10.77.0.1", "10.77.0.2")
CABLE = "zenflow"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces are made by root with iproute2"
)
def test_a_node_that_cannot_be_reached_any_more_is_named(networks: list[str], tasks: Tasks) -> None:
    """Nothing is closed and nothing answers, as after a power failure: both sides give up after the strategy's timeout."""
    port = free_port()
    for node, network in enumerate(networks):
        variables = slurm(node, port=port, tasks_of_nodes=1, host=HOSTS[0])
        tasks.start(
            ["ip", "netns", "exec", network, sys.executable],
            ENDLESS,
            GLOO_SOCKET_IFNAME=CABLE,
            TIMEOUT_S="60",
            **variables,
        )
    tasks.saved(ranks=2)
    _ip("-n", networks[1], "link", "set", CABLE, "down")
    for node, process in enumerate(tasks.processes):
        assert process.wait(200) != 0
        lost = 1 - node
        assert f"Lost: rank {lost} of node {lost} (host " in tasks.output(node).read_text()
