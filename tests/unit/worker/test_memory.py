"""Memory that is left, from files as the kernel writes them."""

import math
import re
from pathlib import Path

import pytest

from lightning_zenflow.worker import machine
from lightning_zenflow.worker.machine import HOST_MEMORY, free_host_memory, lack_of_host_memory
from machine_files import write

GIB = 2**30

MACHINE = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {64 * GIB // 1024} kB\n"}
GROUPS = {
    **MACHINE,
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/user/memory.max": f"{10 * GIB}\n",
    "sys/fs/cgroup/user/memory.current": f"{8 * GIB}\n",
    # Shared memory counts as "file" but cannot be taken back.
    "sys/fs/cgroup/user/memory.stat": f"anon 5\nfile {3 * GIB}\nshmem {2 * GIB}\ninactive_file {GIB}\nactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "given", "gib", "limit"),
    [
        (MACHINE, None, 64, "MemAvailable"),
        (GROUPS, None, 3, "user/memory.max"),
        # A system that does not say.
        ({}, None, math.inf, "unknown"),
        # A virtual machine that grows with use has more memory than its kernel says.
        (GROUPS, "5.5", 5.5, HOST_MEMORY),
        (GROUPS, "inf", math.inf, HOST_MEMORY),
    ],
)
def test_the_least_limit_counts(
    files: dict[str, str], given: str | None, gib: float, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_ROOT", write(tmp_path, files))
    if given is not None:
        monkeypatch.setenv(HOST_MEMORY, given)
    free = free_host_memory()
    assert free.n_bytes == gib * GIB and limit in free.limit
    if gib == math.inf:
        assert lack_of_host_memory(1 << 60, ranks=1, keys="") is None


@pytest.mark.parametrize("given", ["0", "nan", "128 GB"])
def test_what_is_no_number(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_MEMORY, given)
    with pytest.raises(ValueError, match=f"{HOST_MEMORY} must be a number of GiB above 0, or inf, got '{given}'"):
        free_host_memory()


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ROOT", write(tmp_path, GROUPS))
    assert lack_of_host_memory(3 * GIB // 2, ranks=2, keys="") is None
    problem = lack_of_host_memory(2 * GIB, ranks=2, keys="publish_lag=1")
    said = rf"needs 4.00 GiB \({4 * GIB} bytes\) .*but 3.00 GiB .*user/memory.max\); .*publish_lag=1.*{HOST_MEMORY}"
    assert re.search(said, problem or "")
