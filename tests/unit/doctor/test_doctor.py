"""The report on this machine."""

import pytest
import torch

from lightning_zenflow import doctor
from lightning_zenflow.cli import main

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def small_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ELEMENTS", 1 << 12)


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Limits on the trainer's threads do not stop the measurement, as they do not stop the worker of a training.
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 16
    for fact in (torch.__version__, "logical; of this process", "GB free", "GB/s", "ns a parameter and step"):
        assert fact in out
    assert "cannot start" not in out
    monkeypatch.setattr(doctor, "worker_executable", lambda: "/no/worker")
    assert "training cannot start: the worker's benchmark did not end" in doctor.examine()
    monkeypatch.setenv("LIGHTNING_ZENFLOW_HOST_GIB", "many")
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "LIGHTNING_ZENFLOW_HOST_GIB must be a number" in capsys.readouterr().err
