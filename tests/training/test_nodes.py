"""A script that Lightning, torchrun or SLURM starts. Two nodes, which are this machine: one is killed, training goes on with the other."""

import contextlib
import os
import shutil
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
from rank_processes import free_port, run_on_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "node_trainer.py"
CASE = Case(model_options={"ranks_differ": False}, steps=2 * SAVED_AT, strategy_options=KEYS)
ENDLESS = str(10**6)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["trainer", "fabric"])
def test_the_others_end_with_the_error_of_the_communication(loop: str) -> None:
    case = replace(CASE, model="LeavingModule", model_options={}, fails=True, loop=loop)
    stays, _ = run_on_ranks({"leaves": case})["leaves"]
    assert stays.error is not None and "gloo" in stays.error


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
@pytest.mark.parametrize("launcher", ["Lightning", "torchrun"])
def test_a_script_on_two_ranks(launcher: str, tasks: Tasks) -> None:
    command = torchrun(nodes=1, node=0, port=free_port()) if launcher == "torchrun" else [sys.executable]
    tasks.start(command, str(CASE.steps), "", NODES="1", DEVICES="2", MASTER_PORT=str(free_port()))
    assert tasks.processes[0].wait(240) == 0, tasks.output(0)
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


HOSTS = ("10.77.0.1", "10.77.0.2")
CABLE = "zenflow"


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, timeout=60)


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them, `HOSTS[i]` at its end `CABLE` in namespace i."""
    names = [f"zenflow-{os.getpid()}-{node}" for node in range(2)]
    with contextlib.ExitStack() as made:
        for name in names:
            _ip(f"netns add {name}")
            made.callback(_ip, f"netns del {name}")
        _ip(f"link add {CABLE} netns {names[0]} type veth peer name {CABLE} netns {names[1]}")
        for name, host in zip(names, HOSTS, strict=True):
            _ip(f"-n {name} address add {host}/24 dev {CABLE}")
            _ip(f"-n {name} link set {CABLE} up")
            _ip(f"-n {name} link set lo up")
        yield names


NO_NETWORKS = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces are made by root with iproute2"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["killed", pytest.param("cut off", marks=NO_NETWORKS)])
def test_a_node_is_lost_under_slurm(how: str, tasks: Tasks, request: pytest.FixtureRequest) -> None:
    """Slurm itself is not here, but the variables that `srun` sets for each task are.

    A node that is cut off closes nothing and answers nothing, as after a power failure: both give up after the strategy's timeout.
    """
    names, port = request.getfixturevalue("networks") if how == "cut off" else [], free_port()
    for node in range(2):
        slurm = {
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NAME": "train",
            "SLURM_NODELIST": HOSTS[0] if names else "127.0.0.1",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": "0",
            "SLURM_PROCID": str(node),
        }
        variables = {**slurm, "MASTER_PORT": str(port), "NODES": "2", "DEVICES": "1"}
        if names:
            variables |= {"GLOO_SOCKET_IFNAME": CABLE, "TIMEOUT_S": "60"}
        launcher = ["ip", "netns", "exec", names[node]] if names else []
        tasks.start([*launcher, sys.executable], ENDLESS, "", **variables)
    pids = tasks.saved(ranks=2)
    if not names:
        os.kill(pids[1], signal.SIGKILL)
    else:
        _ip(f"-n {names[1]} link set {CABLE} down")
        tasks.fails(1)
    tasks.fails(0)
