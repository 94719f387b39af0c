"""Memory that is left, from files as the kernel writes them."""

import logging
import re
from pathlib import Path

import pytest

from lightning_zenflow.worker.memory import HOST_MEMORY, check_host_memory, free_host_memory
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
    ("files", "n_bytes", "limit"),
    [(MACHINE, 64 * GIB, "MemAvailable"), (GROUPS, 3 * GIB, "user/memory.max")],
)
def test_the_least_limit_counts(files: dict[str, str], n_bytes: int, limit: str, tmp_path: Path) -> None:
    free = free_host_memory(write(tmp_path, files))
    assert free is not None
    assert free.n_bytes == n_bytes
    assert limit in free.limit


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) is None
    assert check_host_memory(first=1 << 60, largest=1 << 60, ranks=1, keys="", root=tmp_path) is None


def test_this_machine() -> None:
    free = free_host_memory()
    assert free is not None
    assert free.n_bytes > 0


def test_what_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path, GROUPS)
    with caplog.at_level(logging.WARNING):
        assert check_host_memory(first=GIB, largest=3 * GIB // 2, ranks=2, keys="", root=root) is None
        assert not caplog.records
        assert check_host_memory(first=GIB, largest=2 * GIB, ranks=2, keys="publish_lag=1", root=root) is None
    (record,) = caplog.records
    assert "may need 4.00 GiB" in record.message
    assert "publish_lag=1" in record.message
    problem = check_host_memory(first=2 * GIB, largest=2 * GIB, ranks=2, keys="publish_lag=1", root=root)
    assert problem is not None
    assert f"needs 4.00 GiB ({4 * GIB} bytes)" in problem
    assert "3.00 GiB" in problem
    assert "publish_lag=1" in problem


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("5.5", None),
        ("inf", None),
        ("3", "needs 4.00 GiB .* but 3.00 GiB .* are available \\(LIGHTNING_ZENFLOW_HOST_GIB\\)"),
        ("0", "LIGHTNING_ZENFLOW_HOST_GIB must be a number of GiB above 0, or inf, got '0'"),
        ("nan", "got 'nan'"),
        ("128 GB", "got '128 GB'"),
    ],
)
def test_the_user_knows_better(
    given: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine that grows with use has more memory than its kernel says."""
    root = write(tmp_path, {"proc/meminfo": "MemAvailable: 4 kB"})
    monkeypatch.setenv(HOST_MEMORY, given)
    found = check_host_memory(first=2 * GIB, largest=2 * GIB, ranks=2, keys="", root=root)
    assert found is None if problem is None else re.search(problem, found or "")
