"""The report on this machine, and what it says of machines with GPUs."""

import math

import pytest
import torch

from lightning_zenflow.cli import main
from lightning_zenflow.doctor import report, speed
from lightning_zenflow.doctor.report import expectations
from lightning_zenflow.doctor.speed import WorkerSpeed

pytestmark = pytest.mark.unit

WORKER = WorkerSpeed(
    instruction_set="avx2", cores=(1, 2), memory_gb_s=150.0, update_ns={1: 0.2, 2: 0.12, 4: 0.08}, coded_ns=0.15
)


@pytest.fixture(autouse=True)
def small_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_ELEMENTS", 1 << 12)


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    for fact in (torch.__version__, "physical", "GB free", "ns a parameter and step", "What to expect"):
        assert fact in out
    assert "cannot start" not in out
    monkeypatch.setattr(speed, "worker_executable", lambda: "/no/worker")
    assert "Training cannot start: the worker's benchmark did not end" in report.examine()
    monkeypatch.setenv("LIGHTNING_ZENFLOW_HOST_GIB", "many")
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "LIGHTNING_ZENFLOW_HOST_GIB must be a number" in capsys.readouterr().err


def test_expectations_beside_gpus() -> None:
    sentences = "\n".join(expectations([80.0, 80.0], [20.0, 25.0], WORKER, free_gb=math.inf))
    assert "AdamW of 1 B parameters takes the worker 0.2 s" in sentences and "0.1 s over PCIe" in sentences
    # Two bytes a parameter and buckets on each GPU.
    assert "about 38 B parameters" in sentences
    assert "offload_parameters=True it has about inf B" in sentences
    assert "1 B parameters in 0.1 s, with up to 27% of the host memory's speed" in sentences
    assert "--gpus 2 --gpus-per-host 2 --gpu-mem 80.0 --pcie 20.0 --cpu-bw 150.0 --host-mem inf" in sentences
    assert "about 3.2 B parameters" in (small_host := "\n".join(expectations([80.0], [20.0], WORKER, free_gb=48.0)))
    assert "offload_parameters" not in small_host
    assert "it has about 12 B, with moments_dtype='int8' as well 19 B" in "\n".join(
        expectations([16.0], [20.0], WORKER, free_gb=200.0)
    )
    assert len(expectations([80.0], [], WORKER, free_gb=48.0)) == 1 and not expectations([], [], None, free_gb=48.0)


def test_limits_on_the_trainers_threads_do_not_stop_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do not stop the worker of a training."""
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    measured = speed.measure_worker(torch.device("cpu"), reserved_share=0.0)
    assert measured.cores and measured.memory_gb_s > 0
