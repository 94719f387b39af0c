"""Facts of this machine: versions, GPUs, cores, memory and limits. Nothing here takes long or trains."""

import ctypes
import mmap
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.worker.memory import free_host_memory
from lightning_zenflow.worker.topology import allowed_cores, core_siblings, cpu_quotas, gpu_numa_cores, numa_nodes

_DISTRIBUTIONS = ("lightning-zenflow", "torch", "lightning", "deepspeed")

_TRIAL_BYTES = 256 * 2**20
"""More than usual limits of locked memory."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device."""

    name: str
    memory_gb: float
    pci_address: str | None
    numa_cores: tuple[int, ...]
    """Cores of its NUMA node; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Cores, memory and limits. 1 GB is 1e9 bytes."""

    system: str
    logical_cores: int
    """That this process may use."""
    physical_cores: int
    """Of these."""
    numa_nodes: int
    """Of these; 0 if unknown."""
    cpu_limit: float | None
    """CPUs whose time control groups grant; None: no limit."""
    memory_gb: float
    free_gb: float | None
    """That training may take; None if unknown."""
    free_limit: str
    """Source of the limit: the machine, or the folder of a control group."""
    memlock_gb: float | None
    """RLIMIT_MEMLOCK; None: unlimited."""
    is_wsl: bool
    """Whether it is the Windows Subsystem for Linux, which page-locks a part of its memory only."""
    has_memfd: bool
    """Whether memory without a name can be shared with the worker."""
    compiler: str | None
    """Path of the C++ compiler; None if there is none."""


def versions() -> dict[str, str]:
    """Versions by name; "missing" for what is not installed, "none" for CUDA in a build of torch without it."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    # The build that is imported; the distribution's version may lack its local part.
    found["torch"] = str(torch.__version__)
    found["CUDA"] = torch.version.cuda or "none"
    return found


def gpus() -> list[Gpu]:
    """The CUDA devices that this process sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        address = runtime_of(torch.device("cuda", index)).pci_address()
        found.append(
            Gpu(
                name=properties.name,
                memory_gb=properties.total_memory / 1e9,
                pci_address=address,
                numa_cores=gpu_numa_cores(address) if address else (),
            )
        )
    return found


def host() -> Host:
    """Cores, memory and limits of this process.

    Raises:
        ValueError: `LIGHTNING_ZENFLOW_HOST_GIB` is not a number above 0.
    """
    cores = allowed_cores()
    free = free_host_memory()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        logical_cores=len(cores),
        physical_cores=len(set(core_siblings(cores).values())),
        numa_nodes=len(numa_nodes(cores)),
        cpu_limit=min((quota.cpus for quota in cpu_quotas()), default=None),
        memory_gb=psutil.virtual_memory().total / 1e9,
        free_gb=free.n_bytes / 1e9 if free else None,
        free_limit=free.limit if free else "unknown",
        memlock_gb=None if memlock == resource.RLIM_INFINITY else memlock / 1e9,
        is_wsl="microsoft" in platform.release().lower(),
        has_memfd=_has_memfd(),
        compiler=shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++"),
    )


def page_lock_refusal(device: torch.device) -> str | None:
    """The system's reason not to page-lock memory for a device as the trainer does; None if it locks it.

    A trial with a little memory: a whole training's may still be too much.
    """
    runtime = runtime_of(device)
    with mmap.mmap(-1, _TRIAL_BYTES) as memory:
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(start)
        # The mapping cannot be closed while something refers to it.
        del start
        try:
            runtime.page_lock(address, _TRIAL_BYTES)
        except RuntimeError as refusal:
            return str(refusal)
        runtime.page_unlock(address)
    return None


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("zenflow-doctor", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True
