"""The host, as the kernel's files in /proc and /sys describe it: the cores that the worker's threads run on, and the memory that is free.

A missing file, as in some containers, means unknown and unlimited. Free memory is checked before training, because the kernel allocates
shared memory when a page is first written: later a host with too little would fail by the out-of-memory killer.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.process import world_size

_ROOT = Path("/")
"""Folder with ``proc`` and ``sys``."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Cores and limits of a rank on its host."""

    host: str
    """Identity of the kernel, by which ranks know their neighbours."""
    allowed: tuple[int, ...]
    """Logical cores the rank may use, ascending."""
    has_gpu: bool
    """Whether the model is on a GPU."""
    gpu_cores: tuple[int, ...]
    """Cores of the GPU's NUMA node, allowed or not; empty: unknown."""
    cpu_limit: float
    """CPU time per time that the control groups of the process grant all of its processes together; infinite without a limit."""


def allowed_cores() -> list[int]:
    """Logical cores this process may use."""
    return sorted(os.sched_getaffinity(0))


def read_place(device: torch.device) -> Place:
    """Reads the place of this rank, whose model is on a device."""
    gpu = _ROOT / "sys/bus/pci/devices" / str(runtime_of(device).pci_address())
    # Unknown in most virtual machines. local_cpulist of a device without a node lists all cores.
    has_node = read_file(gpu / "numa_node") not in ("", "-1")
    limits = [read_file(folder / "cpu.max").split() for folder in control_groups()]
    # "max" stands for no limit.
    cpus = (int(quota) / int(period) for quota, period in filter(None, limits) if quota != "max")
    return Place(
        host=read_file(_ROOT / "proc/sys/kernel/random/boot_id") or os.uname().nodename,
        allowed=tuple(allowed_cores()),
        has_gpu=device.type != "cpu",
        gpu_cores=tuple(parse_core_list(read_file(gpu / "local_cpulist"))) if has_node else (),
        cpu_limit=min(cpus, default=math.inf),
    )


def places_on_this_host(place: Place) -> tuple[list[Place], int]:
    """The places of all ranks on this host, in rank order, and the index of this rank's. A collective: all ranks must call it."""
    places = [place] * world_size()
    if len(places) > 1:
        dist.all_gather_object(places, place)
    on_host = [rank for rank, other in enumerate(places) if other.host == place.host]
    return [places[rank] for rank in on_host], on_host.index(dist.get_rank() if len(places) > 1 else 0)


@contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """Binds this thread to cores, if any are given, so that memory it touches first is allocated on their NUMA node."""
    before = os.sched_getaffinity(0)
    # None may be given, and the process may have lost them in the meantime; placement is an optimisation and not worth an error.
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def parse_core_list(text: str) -> list[int]:
    """Parses the kernel's lists of cores, for example "0-3,8"."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def read_file(path: Path) -> str:
    """Stripped content of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_table(path: Path) -> dict[str, int]:
    """Numbers by name, from a file with one of each a line."""
    rows = map(str.split, read_file(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def control_groups() -> Iterator[Path]:
    """Folders of this process' control groups (version 2), each before its ancestors. In a container the kernel may report the host's path,
    of which only the root is visible: folders may not exist.
    """
    mount = _ROOT / "sys/fs/cgroup"
    for line in read_file(_ROOT / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = mount / line[3:].strip("/")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount))


@dataclass(frozen=True, kw_only=True)
class WorkerCores:
    """Cores of one rank's worker."""

    cores: tuple[int, ...]
    """Logical cores, one thread each."""
    trainer_threads: int
    """Of a trainer on the CPU: one for each core of the rank's share that the worker leaves, at least one."""


def worker_cores(
    request: str | int | Sequence[int], *, places: Sequence[Place], index: int, reserved_share: float | Literal["auto"]
) -> WorkerCores:
    """Chooses the cores of one rank's worker, that with `index` among the `places` of the host's, by the rules of docs/tuning.md, "Worker
    cores". `request` is the key `worker_cores`, `reserved_share` the key `pt_reserved_cores_perc`.

    ValueError: a requested core is not allowed or named twice, or there are fewer cores than requested.
    """
    place = places[index]
    allowed, candidates = place.allowed, _candidates(place)
    sharers = [i for i, other in enumerate(places) if not set(candidates).isdisjoint(_candidates(other))]
    share = _part(candidates, sharers.index(index), len(sharers))
    n_granted = max(1, int(min(len(share), place.cpu_limit / len(places))))
    if isinstance(request, str):
        automatic = max(1 / 8, 2 / n_granted) if place.has_gpu else 1 / 2
        share_of_trainer = automatic if isinstance(reserved_share, str) else reserved_share
        request = max(1, n_granted - round(share_of_trainer * n_granted))
    if isinstance(request, int):
        if request > len(allowed):
            raise ValueError(
                f"ZenFlowConfig: worker_cores must be at most {len(allowed)}, the number of cores this process may use, got {request}"
            )
        cores = sorted(list(dict.fromkeys([*reversed(share), *reversed(candidates), *reversed(allowed)]))[:request])
    else:
        if wrong := [core for i, core in enumerate(request) if core not in allowed or core in request[:i]]:
            raise ValueError(
                f"ZenFlowConfig: worker_cores must be distinct cores this process may use, which are {list(allowed)}, got {list(request)};"
                f" remove {wrong}"
            )
        cores = _part(list(request), index, len(places))
    return WorkerCores(cores=tuple(cores), trainer_threads=max(1, n_granted - len(cores)))


def _candidates(place: Place) -> list[int]:
    return sorted(set(place.allowed) & set(place.gpu_cores)) or list(place.allowed)


def _part(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The rank-th of `ranks` nearly equal runs of the list; one core in turn if there are fewer cores than ranks."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]


HOST_MEMORY = "LIGHTNING_ZENFLOW_HOST_GIB"
"""Environment variable: GiB of memory that the arenas of a host's ranks may take, whatever the kernel says; ``inf`` checks nothing."""


class FreeMemory(NamedTuple):
    """Host memory that can still be allocated, and the name of the limit, for messages."""

    n_bytes: float
    limit: str


def free_host_memory() -> FreeMemory:
    """The least of the machine and of this process' control groups, infinite if unknown, or `HOST_MEMORY`; ValueError: that is wrong."""
    given = os.environ.get(HOST_MEMORY)
    if given is None:
        return min(_free_memory(), default=FreeMemory(n_bytes=math.inf, limit="unknown"))
    try:
        gib = float(given)
    except ValueError:
        gib = math.nan
    if not gib > 0:
        raise ValueError(
            f"{HOST_MEMORY} must be a number of GiB above 0, or inf, got {given!r}; unset it or correct it"
        )
    return FreeMemory(n_bytes=gib * 2**30, limit=HOST_MEMORY)


def lack_of_host_memory(n_bytes: int, *, ranks: int, keys: str) -> str | None:
    """An error message, with the `keys` that determine the size, if a host's arenas, of `n_bytes` each, do not fit, else None."""
    free = free_host_memory()
    if ranks * n_bytes <= free.n_bytes:
        return None
    return (
        f"ZenFlow needs {_gib(ranks * n_bytes)} of host memory for the optimizer states and gradients of {ranks} rank(s) on this host, but"
        f" {_gib(int(free.n_bytes))} are available ({free.limit}); use smaller values of {keys}, down to 12 bytes per parameter for master"
        " weights and moments, 8 with moments_dtype='bfloat16', 6.1 with 'int8', or more hosts;"
        f" where the kernel is wrong, as on virtual machines that grow with use, {HOST_MEMORY} says how much there is"
    )


def _free_memory() -> Iterator[FreeMemory]:
    machine = read_table(_ROOT / "proc/meminfo")
    if "MemAvailable:" in machine:
        yield FreeMemory(n_bytes=1024 * machine["MemAvailable:"], limit="MemAvailable of the machine")
    for group in control_groups():
        limit, usage = read_file(group / "memory.max"), read_file(group / "memory.current")
        # "max" stands for no limit.
        if limit.isdigit() and usage.isdigit():
            statistics = read_table(group / "memory.stat")
            # The page cache, which the kernel reclaims on demand.
            cache = statistics.get("inactive_file", 0) + statistics.get("active_file", 0)
            n_bytes = max(0, int(limit) - max(0, int(usage) - cache))
            yield FreeMemory(n_bytes=n_bytes, limit=f"control group limit {group / 'memory.max'}")


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB ({n_bytes} bytes)"
