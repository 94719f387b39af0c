"""Why a worker cannot start, in words: it does not suit the machine, or threads are refused."""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_zenflow.kernels import cpu
from lightning_zenflow.native import worker_executable
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from lightning_zenflow.worker.process import Worker, WorkerError
from lightning_zenflow.worker.supervisor import SupervisedWorker
from processes import leaves_no_file_open


def start(arena: Arena) -> SupervisedWorker:
    cpu = torch.device("cpu")
    return SupervisedWorker(
        partial(Worker, arena, cores=allowed_cores()[:1], timeout_s=30),
        max_restarts=1,
        telemetry=Telemetry(cpu),
    )


def with_bytes(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content and len(old) == len(new)
        return content.replace(old, new)

    return change


def of_another_architecture(content: bytes) -> bytes:
    return content[:18] + (2).to_bytes(2, "little") + content[20:]  # e_machine: SPARC


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another architecture": (of_another_architecture, "Exec format error"),
    "newer glibc": (with_bytes(b"GLIBC_2.34\0", b"GLIBC_9.34\0"), "version `GLIBC_9.34' not found"),
    "missing library": (with_bytes(b"libc.so.6\0", b"libx.so.6\0"), "libx.so.6: cannot open shared object file"),
    "missing instruction": (lambda _: b"#!/bin/sh\nkill -ILL $$\n", "SIGILL at its start"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_worker_that_cannot_run(name: str, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, reason = DAMAGE[name]
    path = tmp_path / "zenflow-worker"
    path.write_bytes(damage(worker_executable().read_bytes()))
    path.chmod(0o755)
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(path))
    with leaves_no_file_open():
        with pytest.raises(
            WorkerError, match=rf"{path} cannot run on this machine .*: .*{reason}.*; .* build it here: `pip"
        ) as caught:
            start(arena)
        assert "restarted" not in str(caught.value) and "\n" not in str(caught.value)
        del caught


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(worker_executable(), tmp_path)
    (tmp_path / "libzenflow-device.so").touch()
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(tmp_path / "zenflow-worker"))
    message = "libzenflow-device.so cannot run on this machine .*: .*file too short.*; install a wheel"
    with pytest.raises(RuntimeError, match=message):
        cpu._library.__wrapped__()


FEW_THREADS = """#!{python}
import os, resource, sys
worker = os.open({worker!r}, os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.geteuid() == 0:  # which has no such limit
    os.setgid(65534)
    os.setuid(65534)
os.execve(worker, sys.argv, os.environ)
"""


def test_threads_that_the_system_refuses(
    arena: Arena, two_cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "worker"
    path.write_text(FEW_THREADS.format(python=sys.executable, worker=str(worker_executable())))
    path.chmod(0o755)
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(path))
    with pytest.raises(WorkerError, match="(?s)allows no more threads .`ulimit -u`.*lower worker_cores"):
        Worker(arena, cores=two_cores, timeout_s=30)
