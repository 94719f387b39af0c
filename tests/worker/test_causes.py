"""Why a worker cannot start or dies, in words: it does not suit the machine, threads are refused, memory is short."""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_zenflow.kernels import cpu
from lightning_zenflow.native.paths import worker_executable
from lightning_zenflow.telemetry.telemetry import StallClock
from lightning_zenflow.worker import memory
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.cores import allowed_cores
from lightning_zenflow.worker.process import Worker, WorkerError
from lightning_zenflow.worker.supervisor import SupervisedWorker
from machine_files import write
from processes import is_alive, leaves_no_file_open, wait_for

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def start(arena: Arena) -> SupervisedWorker:
    cpu = torch.device("cpu")
    return SupervisedWorker(
        partial(Worker, arena, cores=allowed_cores()[:1], timeout_s=30),
        max_restarts=1,
        stalls=StallClock(cpu),
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


@pytest.mark.parametrize(
    ("files", "counter", "text"),
    [
        ({"proc/self/cgroup": "0::/job\n"}, "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill {}\n"),
        ({}, "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
    ],
    ids=["control group", "machine"],
)
def test_the_out_of_memory_killer_is_named(
    files: dict[str, str],
    counter: str,
    text: str,
    arena: Arena,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The counter is the kernel's, of a machine that is not at hand; the kills are real."""
    monkeypatch.setattr(memory, "_ROOT", write(tmp_path, {**files, counter: text.format(7)}))
    worker = start(arena)

    def kill() -> None:
        pid = worker.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))
        worker.touch(arena.export_offset - 4096, 1, 1)

    with caplog.at_level(logging.WARNING):
        kill()
    assert "out-of-memory" not in caplog.text, "the counter has not risen"
    write(tmp_path, {counter: text.format(9)})
    with pytest.raises(WorkerError) as caught:
        kill()
    worker.kill()
    said = str(caught.value)
    assert f"out-of-memory killer ended 2 process(es) meanwhile, says {tmp_path / counter}" in said
    assert "moments_dtype='bfloat16'" in said and "max_worker_restarts=1; take less memory" in said
