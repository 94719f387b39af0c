"""Memory that is left, from files as the kernel writes them, and the error before training where it is too little."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from harness import Case, fit, workers
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.worker import memory as host_memory
from lightning_zenflow.worker.memory import available, check_host_memory
from machine_files import write
from models import TINY, LinearLossModule
from rank_processes import run_on_ranks

GIB = 2**30

MACHINE = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {64 * GIB // 1024} kB\n"}
V2 = {
    **MACHINE,
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/user/memory.max": f"{10 * GIB}\n",
    "sys/fs/cgroup/user/memory.current": f"{8 * GIB}\n",
    # Shared memory counts as "file" but cannot be taken back.
    "sys/fs/cgroup/user/memory.stat": f"anon 5\nfile {3 * GIB}\nshmem {2 * GIB}\ninactive_file {GIB}\nactive_file 0\n",
}
V1 = {
    **MACHINE,
    "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n",
    # In a container the group's own path does not exist.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}\n",
}


@pytest.mark.parametrize(
    ("files", "n_bytes", "limit"),
    [(MACHINE, 64 * GIB, "MemAvailable"), (V2, 3 * GIB, "user/memory.max"), (V1, 3 * GIB, "memory.limit_in_bytes")],
)
def test_the_least_limit_counts(files: dict[str, str], n_bytes: int, limit: str, tmp_path: Path) -> None:
    room = available(write(tmp_path, files))
    assert room is not None
    assert room.n_bytes == n_bytes
    assert limit in room.limit


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available(tmp_path) is None
    assert check_host_memory(first=1 << 60, largest=1 << 60, ranks=1, keys="", root=tmp_path) is None


def test_this_machine() -> None:
    room = available()
    assert room is not None
    assert room.n_bytes > 0


def test_what_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path, V2)
    with caplog.at_level(logging.WARNING):
        assert check_host_memory(first=GIB, largest=3 * GIB // 2, ranks=2, keys="", root=root) is None
        assert not caplog.records
        assert check_host_memory(first=GIB, largest=2 * GIB, ranks=2, keys="publish_lag=1", root=root) is None
    (record,) = caplog.records
    assert "may come to need 4.00 GiB" in record.message
    assert "publish_lag=1" in record.message
    problem = check_host_memory(first=2 * GIB, largest=2 * GIB, ranks=2, keys="publish_lag=1", root=root)
    assert problem is not None
    assert f"needs 4.00 GiB ({4 * GIB} bytes)" in problem
    assert "3.00 GiB" in problem
    assert "publish_lag=1" in problem


def test_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine is made to look small, before anything of ours is started."""
    monkeypatch.setattr(host_memory, "_ROOT", write(tmp_path, {"proc/meminfo": "MemAvailable: 4 kB"}))
    with pytest.raises(
        MisconfigurationException, match="ZenFlow needs .*(4096 bytes).*update_interval=4, publish_lag='auto'"
    ):
        fit(LinearLossModule(shapes=TINY), ZenFlowStrategy(update_interval=4))
    assert workers() == []


@dataclass
class SmallHost(pl.Callback):
    """Makes the machine look small to one rank."""

    root: Path
    rank: int

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank == self.rank:
            host_memory._ROOT = self.root

    @override
    def on_exception(self, *_: Any) -> None:
        host_memory._ROOT = Path("/")


def test_all_ranks_are_refused_and_know_why(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemAvailable: 4 kB"})
    refused = Case(model_options={"shapes": TINY}, callbacks=(SmallHost(root, rank=1),), fails=True)
    other, small = run_on_ranks({"refused": refused})["refused"]
    assert other.error is not None and small.error is not None
    assert "MisconfigurationException: ZenFlow needs" in small.error
    assert "MisconfigurationException: rank 1: ZenFlow needs" in other.error
