"""What is read of the machine: from folders as the kernel shows them, and from this one."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zenflow.core.device import RUNTIMES, HostRuntime
from lightning_zenflow.worker.topology import (
    Place,
    Quota,
    allowed_cores,
    core_siblings,
    cpu_quotas,
    gpu_numa_cores,
    numa_nodes,
    parse_core_list,
    places_on_this_host,
    read_place,
    running_on,
    socket_cores,
)
from machine_files import write


def test_lists_of_cores(tmp_path: Path) -> None:
    assert [parse_core_list(text) for text in ("", "3", "0-3,8")] == [[], [3], [0, 1, 2, 3, 8]]
    folder = "sys/devices/system/cpu/cpu{}/topology/"
    write(
        tmp_path,
        {
            folder.format(0) + "thread_siblings_list": "0,4\n",
            folder.format(1) + "thread_siblings_list": "1-3\n",
            folder.format(0) + "package_cpus_list": "0-3\n",
            folder.format(4) + "core_siblings_list": "4-7\n",
        },
    )
    assert core_siblings([0, 1, 7], tmp_path) == {0: (0, 4), 1: (1, 2, 3), 7: (7,)}
    assert [socket_cores(core, tmp_path) for core in (0, 4, 8)] == [(0, 1, 2, 3), (4, 5, 6, 7), ()]


def test_cores_near_a_pci_device(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices/"
    write(
        tmp_path,
        {
            devices + "0000:3b:00.0/numa_node": "1\n",
            devices + "0000:3b:00.0/local_cpulist": "4-7,12-15\n",
            # A virtual machine's: no node, and all cores are local.
            devices + "0000:5e:00.0/numa_node": "-1\n",
            devices + "0000:5e:00.0/local_cpulist": "0-15\n",
            # A node of memory only.
            devices + "0000:86:00.0/numa_node": "2\n",
            devices + "0000:86:00.0/local_cpulist": "\n",
        },
    )
    assert gpu_numa_cores("0000:3b:00.0", tmp_path) == (4, 5, 6, 7, 12, 13, 14, 15)
    for unknown in ("0000:5e:00.0", "0000:86:00.0", "0000:af:00.0"):
        assert gpu_numa_cores(unknown, tmp_path) == ()


def test_numa_nodes(tmp_path: Path) -> None:
    for core, node in ((0, 0), (1, 1), (2, 1)):
        (tmp_path / f"sys/devices/system/cpu/cpu{core}/node{node}").mkdir(parents=True)
    assert numa_nodes([1, 2], tmp_path) == [1]
    assert numa_nodes([2, 0], tmp_path) == [0, 1]
    assert numa_nodes([5], tmp_path) == []


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, {}),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, {}),
        (
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/job/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "800000 100000\n",
            },
            {"pod/job": 2.5, "pod": 8.0},
        ),
        # In a container the group's own path does not exist.
        ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "150000 50000\n"}, {".": 3.0}),
    ],
    ids=["nothing", "without limit", "two limits", "in a container"],
)
def test_quotas(files: dict[str, str], cpus: dict[str, float], tmp_path: Path) -> None:
    write(tmp_path, files)
    mount = tmp_path / "sys/fs/cgroup"
    expected = tuple(Quota(cpus=n, group=(mount / folder).stat().st_ino) for folder, n in cpus.items())
    assert cpu_quotas(tmp_path) == expected


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    place = read_place(torch.device("cpu"), tmp_path)
    assert place.host == os.uname().nodename
    assert (place.allowed, place.gpu_cores, place.quotas) == (tuple(allowed_cores()), (), ())


def test_a_gpu_beside_a_single_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnABus(HostRuntime):
        def pci_address(self) -> str:
            return "0000:3b:00.0"

    monkeypatch.setitem(RUNTIMES, "cpu", OnABus)
    write(
        tmp_path,
        {
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:3b:00.0/local_cpulist": "5\n",
            "sys/devices/system/cpu/cpu5/topology/package_cpus_list": "4-7\n",
        },
    )
    place = read_place(torch.device("cpu"), tmp_path)
    assert place.gpu_cores == (4, 5, 6, 7)


def test_ranks_on_other_hosts_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(host=host, allowed=(rank,), gpu_cores=(), quotas=()) for rank, host in enumerate("abab")]
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
