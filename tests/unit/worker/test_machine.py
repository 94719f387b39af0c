"""Which cores the worker gets, and the memory that is left, on machines of every kind: from folders as the kernel shows them, and from
this one.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from lightning_zenflow.core.device import RUNTIMES, HostRuntime
from lightning_zenflow.worker import machine
from lightning_zenflow.worker.machine import (
    HOST_MEMORY,
    Place,
    WorkerCores,
    allowed_cores,
    free_host_memory,
    lack_of_host_memory,
    places_on_this_host,
    read_place,
    running_on,
    worker_cores,
)

Request = str | int | Sequence[int]


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes files below `root`, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def place(
    allowed: Sequence[int], gpu_cores: Sequence[int] = (), cpu_limit: float = math.inf, *, has_gpu: bool = False
) -> Place:
    near = tuple(gpu_cores)
    return Place(
        host="here", allowed=tuple(allowed), has_gpu=has_gpu or bool(near), gpu_cores=near, cpu_limit=cpu_limit
    )


def choose(request: Request, places: Sequence[Place], reserved: float | Literal["auto"]) -> list[WorkerCores]:
    """The choice of each rank."""
    return [worker_cores(request, places=places, index=index, reserved_share=reserved) for index in range(len(places))]


# Two NUMA nodes: physical cores 0-7 and 8-15, 16-31 are their second logical cores.
FIRST = (*range(8), *range(16, 24))
SECOND = (*range(8, 16), *range(24, 32))
FOUR_GPUS = [place(range(32), near) for near in (FIRST, FIRST, SECOND, SECOND)]


@pytest.mark.parametrize(
    ("request_", "places", "reserved", "expected"),
    [
        # The trainer keeps its share.
        ("auto", [place(range(1))], 0.5, [[0]]),
        ("auto", [place(range(2))], 1.0, [[1]]),
        ("auto", [place(range(8))], 0.25, [[2, 3, 4, 5, 6, 7]]),
        # By default half of them where it computes there, otherwise an eighth, two at least; the worker has one in any case.
        ("auto", [place(range(16))], "auto", [[*range(8, 16)]]),
        ("auto", [place(range(16), has_gpu=True)], "auto", [[*range(2, 16)]]),
        ("auto", [place(range(48), has_gpu=True)], "auto", [[*range(6, 48)]]),
        ("auto", [place(range(8), has_gpu=True)] * 2, "auto", [[2, 3], [6, 7]]),
        ("auto", [place(range(2), has_gpu=True)], "auto", [[1]]),
        # Ranks share no core while there are enough.
        ("auto", [place(range(8))] * 3, 0.0, [[0, 1], [2, 3, 4], [5, 6, 7]]),
        ("auto", [place(range(2))] * 4, 0.5, [[0], [1], [0], [1]]),
        # Numbers and lists.
        (2, [place(range(8))] * 2, 0.5, [[2, 3], [6, 7]]),
        (8, [place(range(8))] * 2, 0.5, [list(range(8))] * 2),
        ([3, 1], [place(range(4))], 0.5, [[3, 1]]),
        ([0, 2, 4, 6], [place(range(8))] * 2, 0.5, [[0, 2], [4, 6]]),
        # One core in turn, rather than all of them for every rank.
        ([0, 2], [place(range(8))] * 3, 0.5, [[0], [2], [0]]),
        # Ranks share the cores of their GPU's node.
        ("auto", FOUR_GPUS, 0.0, [[*range(8)], [*range(16, 24)], [*range(8, 16)], [*range(24, 32)]]),
        ("auto", FOUR_GPUS, 0.5, [[*range(4, 8)], [*range(20, 24)], [*range(12, 16)], [*range(28, 32)]]),
        # The node is not known, allowed in part, or not allowed: who has the same candidates shares them.
        ("auto", [place(range(6, 11), FIRST)], 0.0, [[6, 7]]),
        ("auto", [place(range(8), p.gpu_cores) for p in FOUR_GPUS], 0.0, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # As DeepSpeed's --bind_cores_to_rank does: what is bound already is not divided again.
        ("auto", [place([4 * i, 4 * i + 1], FIRST) for i in range(2)], 0.0, [[0, 1], [4, 5]]),
        # A number reaches beyond the share: cores of the node, then of the other one.
        (9, FOUR_GPUS[:2], 0.0, [[*range(8), 23], [7, *range(16, 24)]]),
        (17, FOUR_GPUS[1:2], 0.0, [[*range(8), *range(16, 24), 31]]),
        # Control groups; the host's ranks share a limit.
        ("auto", [place(range(16), cpu_limit=3.5)], 0.0, [[13, 14, 15]]),
        ("auto", [place(range(16), cpu_limit=4)] * 2, 0.0, [[6, 7], [14, 15]]),
        ("auto", [place(range(16), cpu_limit=0.5)], 0.0, [[15]]),
        (3, [place(range(16), cpu_limit=2)], 0.0, [[13, 14, 15]]),
    ],
)  # fmt: skip
def test_cores(
    request_: Request, places: Sequence[Place], reserved: float | Literal["auto"], expected: list[list[int]]
) -> None:
    assert [list(chosen.cores) for chosen in choose(request_, places, reserved)] == expected


@pytest.mark.parametrize(
    ("cores", "ranks", "request_", "expected"),
    [(2, 1, "auto", 1), (1, 1, "auto", 1), (16, 1, "auto", 8), (16, 2, "auto", 4), (4, 1, 3, 1), (4, 1, 4, 1)],
)
def test_a_trainer_on_the_cpu_takes_the_other_cores(cores: int, ranks: int, request_: Request, expected: int) -> None:
    assert choose(request_, [place(range(cores))] * ranks, 0.5)[0].trainer_threads == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([0, 9], r"must be distinct cores this process may use, which are \[0, 1, 2, 3\], got \[0, 9\]; remove \[9\]"),
        ([1, 2, 1], r"must be distinct .*, got \[1, 2, 1\]; remove \[1\]"),
        (5, "must be at most 4, .*, got 5"),
    ],
)
def test_cores_that_are_not_allowed(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=f"worker_cores {message}"):
        choose(request_, [place(range(4))], 0.5)


UNLIMITED = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
LIMITED = {
    "proc/self/cgroup": "0::/pod/job\n",
    "sys/fs/cgroup/pod/job/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/pod/cpu.max": "800000 100000\n",
}
GPU = "sys/bus/pci/devices/0000:3b:00.0/"


@pytest.mark.parametrize(
    ("files", "cores", "limit"),
    [
        ({GPU + "numa_node": "1\n", GPU + "local_cpulist": "4-5,12\n", **UNLIMITED}, (4, 5, 12), math.inf),
        # A virtual machine's: no node, and all cores are local.
        ({GPU + "numa_node": "-1\n", GPU + "local_cpulist": "0-15\n"}, (), math.inf),
        # A node of memory only.
        ({GPU + "numa_node": "2\n", GPU + "local_cpulist": "\n"}, (), math.inf),
        ({}, (), math.inf),
        (LIMITED, (), 2.5),
        # In a container the group's own path does not exist.
        ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "150000 50000\n"}, (), 3.0),
    ],
)
def test_cores_of_a_gpus_node_and_limits_of_cpu_time(
    files: dict[str, str], cores: tuple[int, ...], limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnABus(HostRuntime):
        def pci_address(self) -> str:
            return "0000:3b:00.0"

    monkeypatch.setitem(RUNTIMES, "meta", OnABus)
    monkeypatch.setattr(machine, "_ROOT", write(tmp_path, files))
    place = read_place(torch.device("meta"))
    assert (place.has_gpu, place.gpu_cores, place.cpu_limit) == (True, cores, limit)
    assert (place.host, place.allowed) == (os.uname().nodename, tuple(allowed_cores()))
    on_cpu = read_place(torch.device("cpu"))
    assert (on_cpu.has_gpu, on_cpu.gpu_cores, on_cpu.cpu_limit) == (False, (), limit)


def test_ranks_on_other_hosts_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [replace(place([rank]), host=host) for rank, host in enumerate("abab")]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "all_gather_object", lambda gathered, _: gathered.__setitem__(slice(None), places))
    assert places_on_this_host(places[3]) == ([places[1], places[3]], 1)


def test_running_on_cores_and_back() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with pytest.raises(KeyError), running_on([core]):
        assert read_place(torch.device("cpu")).allowed == (core,)
        raise KeyError
    for nothing_else in ([], [8191]):
        with running_on(nothing_else):
            assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


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
