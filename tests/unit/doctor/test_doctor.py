"""The report on machines that are not at hand, and on this one."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from lightning_zenflow.cli import main
from lightning_zenflow.core.device import HostRuntime
from lightning_zenflow.doctor import speed
from lightning_zenflow.doctor.machine import Gpu, Host, page_lock_refusal
from lightning_zenflow.doctor.report import Examination, as_text, expectations, largest_model
from lightning_zenflow.doctor.speed import Pcie, Worker
from lightning_zenflow.estimate.machine import Machine

pytestmark = pytest.mark.unit

HOST = Host(
    system="Linux 6.1, x86_64",
    logical_cores=64,
    physical_cores=32,
    numa_nodes=2,
    cpu_limit=None,
    memory_gb=512.0,
    free_gb=500.0,
    free_limit="MemAvailable of the machine",
    memlock_gb=None,
    is_wsl=False,
    has_memfd=True,
    compiler="/usr/bin/g++",
)
GPU = Gpu(name="A100", memory_gb=80.0, pci_address="0000:3b:00.0", numa_cores=tuple(range(32)))
WORKER = Worker(
    path="/bin/zenflow-worker",
    instruction_set="avx2",
    cores=tuple(range(1, 32)),
    memory_gb_s=150.0,
    update_ns={1: 0.2, 2: 0.12, 4: 0.08},
)


def machine(n_gpus: int = 2, **changes: Any) -> Examination:
    return Examination(
        versions={"python": "3.11.7", "torch": "2.13.0", "CUDA": "12.8"},
        host=dataclasses.replace(HOST, **changes),
        gpus=[GPU] * n_gpus,
        pcie=[Pcie(d2h_gb_s=25.0, h2d_gb_s=24.0, both_gb_s=20.0)] * n_gpus,
        pcie_error=None,
        page_lock_refusal=None,
        worker=WORKER,
        worker_error=None,
    )


def test_gpus_that_are_busy_leave_the_rest_of_the_report() -> None:
    busy = dataclasses.replace(machine(n_gpus=2), pcie=[], pcie_error="CUDA out of memory")
    text = as_text(busy)
    assert "PCIe not measured" in text
    assert "PCIe could not be measured (CUDA out of memory): run it again while nothing else uses the GPUs." in text
    assert "estimate --params" not in text


def test_one_screen() -> None:
    text = as_text(machine())
    assert len(text.splitlines()) <= 24
    for fact in (
        "2.13.0",
        "A100, 80.0 GB",
        "d2h 25.0, h2d 24.0",
        "32 physical, 64 logical",
        "2 NUMA nodes",
        "500.0 GB free",
    ):
        assert fact in text
    assert "--gpus 2 --gpus-per-host 2 --gpu-mem 80 --pcie 20 --cpu-bw 150 --cpu-cores 32 --host-mem 500" in text


def test_largest_models_are_those_of_the_estimate() -> None:
    """About 20 bytes a parameter on one GPU without offload, 2 and the columns with it; the host's memory bounds it."""
    alone = Machine(gpus=1, gpu_mem=80, pcie=25, cpu_bw=150)
    assert largest_model(alone, lambda c: c.none) == pytest.approx(4e9, rel=0.05)
    assert largest_model(alone, lambda c: c.zenflow) > 2.5 * largest_model(alone, lambda c: c.none)
    little = dataclasses.replace(alone, host_mem=48)
    assert largest_model(little, lambda c: c.zenflow) == pytest.approx(48e9 / 15.6, rel=0.05)
    assert largest_model(dataclasses.replace(alone, gpu_mem=1e-3), lambda c: c.zenflow) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cpu_limit": 8.0}, "grants 8 CPUs of the 64"),
        ({"physical_cores": 4}, "2 physical cores a GPU are few"),
        ({"compiler": None}, "Without a C compiler"),
        ({"has_memfd": False}, "Training cannot start"),
        ({"is_wsl": True}, "WSL2 page-locks a part of its memory only"),
        ({"free_gb": None}, "--cpu-cores 32 --step-ms"),
    ],
)
def test_advice(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in "\n".join(expectations(machine(**changes)))
    assert "Training cannot start" not in "\n".join(expectations(machine()))


@pytest.mark.parametrize("refused", [False, True])
def test_page_locking_is_tried(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def page_lock(self: HostRuntime, address: int, n_bytes: int) -> None:
        if refused:
            raise RuntimeError("cudaHostRegister failed with CUDA error 2")
        locked.append(address)

    monkeypatch.setattr(HostRuntime, "page_lock", page_lock)
    monkeypatch.setattr(HostRuntime, "page_unlock", lambda self, address: locked.remove(address))
    found = dataclasses.replace(machine(), page_lock_refusal=page_lock_refusal(torch.device("cpu")))
    assert locked == []
    sentences = [s for s in expectations(found) if "cannot be page-locked (cudaHostRegister failed" in s]
    assert len(sentences) == refused
    assert all("wait" in s and "--ulimit memlock=-1" in s for s in sentences)


def test_a_missing_worker_is_said_first() -> None:
    broken = dataclasses.replace(machine(0), worker=None, worker_error="The worker's executable is missing")
    assert expectations(broken)[0] == "Training cannot start: The worker's executable is missing"
    assert "No GPU" in expectations(broken)[1]


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    examination = json.loads(capsys.readouterr().out)
    assert examination["host"]["physical_cores"] >= 1
    assert examination["worker"]["memory_gb_s"] > 0
    assert examination["worker_error"] is None
    assert examination["expect"]


def test_limits_on_the_trainers_threads_do_not_stop_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do not stop the worker of a training."""
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    monkeypatch.setattr(speed, "_elements", lambda: 1 << 12)
    measured = speed.measure_worker(torch.device("cpu"), reserved_share=0.0)
    assert measured.cores and measured.memory_gb_s > 0
