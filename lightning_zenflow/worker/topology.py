"""What the machine says about its cores: which ones a rank may use, which are near its GPU, and how many CPUs' time it gets.

Everything is read from files of the kernel. Where one is missing, as in some containers, nothing is known and nothing is limited.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A control group's limit on CPU time."""

    cpus: float
    """How many CPUs' time its processes get together."""
    group: int
    """Which control group it is: the number of its folder, the same in all containers of a host."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs."""

    host: str
    """Which kernel: core numbers of ranks with the same one mean the same cores."""
    allowed: tuple[int, ...]
    """Logical cores that the rank may use, ascending."""
    gpu_numa_cores: tuple[int, ...]
    """Those of the NUMA node that its GPU hangs on, allowed or not; empty where that is not known and where the model trains on the CPU."""
    gpu_socket_cores: tuple[int, ...]
    """Those of the socket that this node is a part of."""
    quotas: tuple[Quota, ...]


def allowed_cores() -> list[int]:
    """Cores this process may run on: respects ``taskset``, cgroup cpusets and DeepSpeed's core binding."""
    return sorted(os.sched_getaffinity(0))


def read_place(device: torch.device, root: Path = _ROOT) -> Place:
    """This rank's.

    Args:
        device: where the model is.
        root: where the machine's files lie.
    """
    address = _pci_address(device)
    near = () if address is None else gpu_numa_cores(address, root)
    return Place(
        host=_read(root / "proc/sys/kernel/random/boot_id") or os.uname().nodename,
        allowed=tuple(allowed_cores()),
        gpu_numa_cores=near,
        gpu_socket_cores=socket_cores(near[0], root) if near else (),
        quotas=cpu_quotas(root),
    )


def places_on_this_host(place: Place) -> tuple[list[Place], int]:
    """Those of all ranks on this host in the order of their ranks, and which of them is this rank's. All ranks call it."""
    places: list[Place | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    neighbours = [(rank, p) for rank, p in enumerate(places) if p is not None and p.host == place.host]
    return [p for _, p in neighbours], [rank for rank, _ in neighbours].index(dist.get_rank())


def gpu_numa_cores(pci_address: str, root: Path = _ROOT) -> tuple[int, ...]:
    """Cores of the NUMA node that a PCI device hangs on; none where the system does not know, as in most virtual machines.

    Args:
        pci_address: as "0000:3b:00.0".
        root: where the machine's files lie.
    """
    folder = root / "sys/bus/pci/devices" / pci_address
    # Without a node the list of cores has all of them.
    if _read(folder / "numa_node") in ("", "-1"):
        return ()
    return tuple(parse_core_list(_read(folder / "local_cpulist")))


def socket_cores(core: int, root: Path = _ROOT) -> tuple[int, ...]:
    """All cores of a core's socket, which may have several NUMA nodes; none where the system does not say."""
    folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
    # The second is the name before Linux 5.3.
    return tuple(parse_core_list(_read(folder / "package_cpus_list") or _read(folder / "core_siblings_list")))


@contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """Keeps this thread on the given cores, if any, so that memory that it is the first to touch belongs to their NUMA node."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    # Where somebody has taken these cores from the process in the meantime, that is no reason to end training.
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def core_siblings(cores: Sequence[int], root: Path = _ROOT) -> dict[int, tuple[int, ...]]:
    """For each core, the logical cores that share its physical core; itself alone where the system does not say."""
    folder = root / "sys/devices/system/cpu"
    texts = {core: _read(folder / f"cpu{core}/topology/thread_siblings_list") for core in cores}
    return {core: tuple(parse_core_list(text or str(core))) for core, text in texts.items()}


def numa_nodes(cores: Sequence[int], root: Path = _ROOT) -> list[int]:
    """The NUMA nodes that these cores belong to, as far as the system says."""
    folders = [root / f"sys/devices/system/cpu/cpu{core}" for core in cores]
    return sorted({int(node.name[4:]) for folder in folders for node in folder.glob("node[0-9]*")})


def cpu_quotas(root: Path = _ROOT) -> tuple[Quota, ...]:
    """Limits on CPU time of this process' control groups."""
    quotas = []
    for version, folder in control_groups("cpu", root):
        if version == "v2":
            quota, _, period = _read(folder / "cpu.max").partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        # Without a limit it is "max" or -1.
        if quota.isdigit() and period.isdigit():
            quotas.append(Quota(cpus=int(quota) / int(period), group=folder.stat().st_ino))
    return tuple(quotas)


def parse_core_list(text: str) -> list[int]:
    """Reads the kernel's lists, as "0-3,8"."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def _pci_address(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # Not in older releases of torch.
    numbers = [int(getattr(properties, f"pci_{field}_id", -1)) for field in ("domain", "bus", "device")]
    return None if min(numbers) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _read(path: Path) -> str:
    """A file without the white space around it; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def control_groups(controller: str, root: Path) -> Iterator[tuple[Literal["v1", "v2"], Path]]:
    """Folders in which limits of this process may be written, its own group's before its ancestors'.

    In a container the path that the kernel names may be the host's, and only its end or its root exist: a folder may be missing.

    Args:
        controller: "memory" or "cpu".
        root: where the machine's files lie, "/" but for tests.

    Yields:
        The version of control groups, which decides on the names of the files, and the folder.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for folder in _with_ancestors(root / "sys/fs/cgroup", path):
                yield "v2", folder
        elif controller in controllers.split(","):
            for folder in _with_ancestors(root / "sys/fs/cgroup" / controller, path):
                yield "v1", folder


def _with_ancestors(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.strip("/")
    for group in [folder, *folder.parents]:
        yield group
        if group == mount:
            return
