"""What this machine has and how fast it is, on one screen, and what to expect of it."""

import math
import os
import platform
import resource
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import psutil
import torch
from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.doctor.speed import WorkerSpeed, measure_pcie, measure_worker
from lightning_zenflow.estimate.cost import estimate
from lightning_zenflow.estimate.setup import Setup
from lightning_zenflow.estimate.shapes import shapes_of_count
from lightning_zenflow.worker.memory import free_host_memory
from lightning_zenflow.worker.topology import allowed_cores, core_siblings, cpu_quotas, numa_nodes

_LARGE = 10e9
"""Parameters of a model whose memory is proportional to its size."""


def examine() -> str:
    """Reads and measures this machine; takes some seconds.

    Returns:
        A table of facts and measurements, and sentences on what to expect.

    Raises:
        ValueError: `LIGHTNING_ZENFLOW_HOST_GIB` is not a number above 0.
    """
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    rows, problems, worker = _facts(), [], None
    try:
        worker = measure_worker(device, ZenFlowConfig().pt_reserved_cores_perc)
        times = ", ".join(f"S = {s}: {ns:.2f}" for s, ns in worker.update_ns.items())
        rows["worker"] = f"{worker.instruction_set}, cores {worker.cores}, {worker.memory_gb_s:.1f} GB/s;"
        rows["worker"] += f" ns a parameter and step, {times}"
    except RuntimeError as error:
        problems.append(f"Training cannot start: {error}")
    if not gpus:
        problems.append("No GPU: training runs on the CPU, for tests and small models.")
    pcie: list[float] = []
    try:
        pcie = [measure_pcie(index) for index in range(len(gpus))]
    except RuntimeError as error:  # torch's, as where another process has taken the memory
        reason = str(error).partition("\n")[0]
        problems.append(f"PCIe could not be measured ({reason}): run it again while nothing else uses the GPUs.")
    for i, gpu in enumerate(gpus):
        speed = f"{pcie[i]:.1f} GB/s each way" if pcie else "not measured"
        rows[f"GPU {i}"] = f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB; PCIe {speed}"
    free = free_host_memory()
    expected = expectations([gpu.total_memory / 1e9 for gpu in gpus], pcie, worker, free_gb=free.n_bytes / 1e9)
    table = tabulate(rows.items(), tablefmt="plain", disable_numparse=True)
    return "\n".join([table, "", "What to expect", *(f"- {sentence}" for sentence in problems + expected)])


def expectations(
    gpu_gb: Sequence[float], pcie: Sequence[float], worker: WorkerSpeed | None, *, free_gb: float
) -> list[str]:
    """How fast the CPU's work is, and what fits.

    Args:
        gpu_gb: memory of each GPU.
        pcie: speed of each (`measure_pcie`); empty if they could not be measured.
        worker: None if it could not be measured.
        free_gb: host memory.
    """
    if worker is None:
        return []
    sentences = [
        f"AdamW of 1 B parameters takes the worker {worker.update_ns[1]:.2g} s, alone on this host. It hides behind steps that take longer"
        f" without offload; with S = 4 behind steps of {worker.update_ns[4]:.2g} s, with moments_dtype='int8' of {worker.coded_ns:.2g} s."
    ]
    if pcie:
        setup = Setup(
            model=shapes_of_count(_LARGE),
            step_ms=1000,
            gpus=len(gpu_gb),
            gpus_per_host=len(gpu_gb),
            gpu_mem=_rounded(min(gpu_gb)),
            pcie=_rounded(min(pcie)),
            cpu_bw=_rounded(worker.memory_gb_s),
            host_mem=_rounded(free_gb),
        )
        with_weights = replace(setup, stage=3, offload_parameters=True)
        largest, on_host = _largest(setup), _largest(with_weights)
        coded = _largest(with_weights, moments_dtype="int8")
        sentences += [
            f"Gradients of 1 B parameters in bf16 take {2 / setup.pcie:.2g} s over PCIe, as do weights.",
            f"The largest model in bf16, before activations, has about {largest:.2g} B parameters.",
            *([_with_weights_on_host(setup, on_host, coded)] if on_host > largest else []),
            f"For your model, with its parameters and step time: lightning-zenflow estimate --params 7e9 --step-ms 1000 --gpus {setup.gpus}"
            f" --gpus-per-host {setup.gpus} --gpu-mem {setup.gpu_mem} --pcie {setup.pcie} --cpu-bw {setup.cpu_bw}"
            f" --host-mem {setup.host_mem}",
        ]
    return sentences


def _largest(setup: Setup, **keys: Any) -> float:
    """1e9 parameters that fit, with the schedule that training starts with; `setup` is of `_LARGE`. A GPU has few weights of the host."""
    (cost,) = estimate(setup, ZenFlowConfig(update_interval=1, publish_lag=0, **keys)).costs.values()
    fullness = cost.fullness(setup)
    fullest = fullness["host"] if setup.offload_parameters else max(fullness.values())
    return _LARGE / 1e9 / fullest if fullest else math.inf


def _with_weights_on_host(setup: Setup, largest: float, coded: float) -> str:
    """What stage 3 with parameters in host memory makes possible, and takes: each GPU fetches its part twice, while AdamW runs."""
    share = setup.pcie * setup.gpus / setup.cpu_bw
    return (
        f"With stage=3 and offload_parameters=True it has about {largest:.2g} B, with moments_dtype='int8' as well {coded:.2g} B."
        f" A step then fetches 1 B parameters in"
        f" {4 / setup.pcie / setup.gpus:.2g} s, with up to {share:.0%} of the host memory's speed."
    )


def _facts() -> dict[str, str]:
    """Versions, system, cores, memory and limits of this process."""
    cores, free = allowed_cores(), free_host_memory()
    limits = [f"; a control group grants {quota.cpus:g} CPUs" for quota in cpu_quotas()]
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "versions": ", ".join(f"{name} {version(name)}" for name in ("lightning-zenflow", "lightning", "deepspeed")),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "compiler": str(shutil.which(os.environ.get("CXX") or "g++")),
        "cores": f"{len(set(core_siblings(cores).values()))} physical, {len(cores)} logical, of this process;"
        f" {len(numa_nodes(cores))} NUMA nodes known{''.join(limits)}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB, {free.n_bytes / 1e9:.1f} GB free ({free.limit})",
        "memlock": "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock / 1e9:.3g} GB",
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
