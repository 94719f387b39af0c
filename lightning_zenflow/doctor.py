"""The report of `lightning-zenflow doctor`: what this machine has, for issues too, and how fast the worker is on it."""

import json
import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import version
from statistics import median

import psutil
import torch
from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.native.paths import worker_executable
from lightning_zenflow.worker.cores import worker_cores
from lightning_zenflow.worker.memory import free_host_memory
from lightning_zenflow.worker.process import worker_environment
from lightning_zenflow.worker.topology import allowed_cores, core_siblings, cpu_quotas, numa_nodes, read_place

_ELEMENTS = 1 << 24
"""Of the worker's benchmark: 128 MiB are read and written by its triad, more than most caches hold; all its arrays take 512 MiB."""

_BENCH_OPTIONS = ("--repeats", "3", "--max-steps", "4")

_TIMEOUT_S = 120.0


def examine() -> str:
    """A table of facts and measurements of this machine; takes some seconds.

    Raises:
        ValueError: `LIGHTNING_ZENFLOW_HOST_GIB` is not a number above 0.
    """
    cores, free = allowed_cores(), free_host_memory()
    limits = [f"; a control group grants {quota.cpus:g} CPUs" for quota in cpu_quotas()]
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rows = {
        "versions": ", ".join(f"{name} {version(name)}" for name in ("lightning-zenflow", "lightning", "deepspeed")),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "compiler": str(shutil.which(os.environ.get("CXX") or "g++")),
        "cores": f"{len(set(core_siblings(cores).values()))} physical, {len(cores)} logical, of this process;"
        f" {len(numa_nodes(cores))} NUMA nodes known{''.join(limits)}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB, {free.n_bytes / 1e9:.1f} GB free ({free.limit})",
        "memlock": "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock / 1e9:.3g} GB",
    }
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    rows |= {f"GPU {i}": f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB" for i, gpu in enumerate(gpus)}
    if not gpus:
        rows["GPU"] = "none: training runs on the CPU, for tests and small models"
    try:
        rows["worker"] = _worker(torch.device("cuda", 0) if gpus else torch.device("cpu"))
    except RuntimeError as error:
        rows["worker"] = f"training cannot start: {error}"
    return str(tabulate(rows.items(), tablefmt="plain", disable_numparse=True))


def _worker(device: torch.device) -> str:
    """Runs the worker's own benchmark on the cores that it would get beside one rank.

    Args:
        device: of that rank.

    Raises:
        RuntimeError: the executable is missing, fails, or takes too long.
    """
    place, reserved_share = read_place(device), ZenFlowConfig().pt_reserved_cores_perc
    cores = worker_cores(
        "auto", places=[place], index=0, siblings=core_siblings(place.allowed), reserved_share=reserved_share
    ).cores
    command = [str(worker_executable()), "--bench", "--cores", ",".join(map(str, cores)), "--elements", str(_ELEMENTS)]
    command += _BENCH_OPTIONS
    try:
        done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the worker's benchmark did not end: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"the worker's benchmark failed with status {done.returncode}: {done.stderr.strip()}")
    head, *lines = map(json.loads, done.stdout.splitlines())

    def of(kernel: str, n_steps: int, key: str) -> float:
        return median(float(line[key]) for line in lines if (line["kernel"], line["steps"]) == (kernel, n_steps))

    times = ", ".join(f"S = {s}: {of('replay', s, 'ns_per_parameter') / s:.2f}" for s in (1, 2, 4))
    speed = f"{of('triad', 0, 'gb_per_s'):.1f} GB/s of host memory"
    return f"{head['instruction_set']}, cores {cores}, {speed}; ns a parameter and step, {times}"
