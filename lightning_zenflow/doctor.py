"""The report of `lightning-zenflow doctor`: what this machine has, for issues too, and the memory bandwidth of the worker's cores."""

import math
import platform
import resource
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from statistics import median

import psutil
import torch
from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.native import worker_executable
from lightning_zenflow.worker.machine import free_host_memory, read_place, worker_cores
from lightning_zenflow.worker.process import worker_environment

_TIMEOUT_S = 120.0


def examine() -> tuple[str, bool]:
    """A table of facts and measurements of this machine, and whether its worker runs; takes some seconds.

    Raises:
        ValueError: `LIGHTNING_ZENFLOW_HOST_GIB` is not a number above 0.
    """
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    place, free = read_place(torch.device("cuda", 0) if gpus else torch.device("cpu")), free_host_memory()
    limit = "" if place.cpu_limit == math.inf else f"; a control group grants {place.cpu_limit:g} CPUs"
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rows = {
        "versions": ", ".join(f"{name} {version(name)}" for name in ("lightning-zenflow", "lightning", "deepspeed")),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical; of this process"
        f" {len(place.allowed)}, of the GPU's NUMA node {len(place.gpu_cores) or 'unknown'}{limit}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB, {free.n_bytes / 1e9:.1f} GB free ({free.limit})",
        "memlock": "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock / 1e9:.3g} GB",
    }
    rows |= {f"GPU {i}": f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB" for i, gpu in enumerate(gpus)}
    if not gpus:
        rows["GPU"] = "none: training runs on the CPU, for tests and small models"
    reserved_share = ZenFlowConfig().pt_reserved_cores_perc
    cores = worker_cores("auto", places=[place], index=0, reserved_share=reserved_share).cores
    try:
        rows["worker"], runs = f"{triad(cores):.1f} GB/s of host memory on cores {cores}", True
    except RuntimeError as error:
        rows["worker"], runs = f"training cannot start: {error}", False
    return str(tabulate(rows.items(), tablefmt="plain", disable_numparse=True)), runs


def triad(cores: Sequence[int]) -> float:
    """Memory bandwidth in GB/s by STREAM's triad, in the worker's own benchmark on these cores.

    Raises:
        RuntimeError: the executable is missing, fails, or takes too long.
    """
    command = [str(worker_executable()), "--bench", ",".join(map(str, cores))]
    try:
        done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the worker's benchmark did not end: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"the worker's benchmark failed with status {done.returncode}: {done.stderr.strip()}")
    return median(map(float, done.stdout.split()))
