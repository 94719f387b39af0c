"""What is read of the machine: from folders as the kernel shows them, and from this one."""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zenflow.core.device import RUNTIMES, HostRuntime
from lightning_zenflow.worker.machine import (
    Place,
    allowed_cores,
    places_on_this_host,
    read_place,
    running_on,
)
from machine_files import write

UNLIMITED = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
GPU = "sys/bus/pci/devices/0000:3b:00.0/"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({GPU + "numa_node": "1\n", GPU + "local_cpulist": "4-5,12\n", **UNLIMITED}, (4, 5, 12)),
        # A virtual machine's: no node, and all cores are local.
        ({GPU + "numa_node": "-1\n", GPU + "local_cpulist": "0-15\n"}, ()),
        # A node of memory only.
        ({GPU + "numa_node": "2\n", GPU + "local_cpulist": "\n"}, ()),
        ({}, ()),
    ],
)
def test_cores_of_a_gpus_node(
    files: dict[str, str], cores: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnABus(HostRuntime):
        def pci_address(self) -> str:
            return "0000:3b:00.0"

    monkeypatch.setitem(RUNTIMES, "cpu", OnABus)
    place = read_place(torch.device("cpu"), write(tmp_path, files))
    assert place.gpu_cores == cores
    # What the other files would say.
    assert (place.host, place.allowed, place.cpu_limit) == (os.uname().nodename, tuple(allowed_cores()), math.inf)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        (
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/job/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "800000 100000\n",
            },
            2.5,
        ),
        # In a container the group's own path does not exist.
        ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "150000 50000\n"}, 3.0),
    ],
    ids=["two limits", "in a container"],
)
def test_limits_of_cpu_time(files: dict[str, str], cpus: float, tmp_path: Path) -> None:
    place = read_place(torch.device("cpu"), write(tmp_path, files))
    assert (place.cpu_limit, place.gpu_cores) == (cpus, ())


def test_ranks_on_other_hosts_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(host=host, allowed=(rank,), gpu_cores=(), cpu_limit=math.inf) for rank, host in enumerate("abab")]
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
