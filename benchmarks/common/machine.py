"""The machine of a measurement in detail."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_zenflow.cli import triad, worker_place
from lightning_zenflow.core.device import runtime_of

_GPU_FIELDS = (
    *("name", "driver_version", "memory.total"),
    *(f"pcie.link.{what}" for what in ("gen.current", "gen.max", "width.current")),
)


_COPY_BYTES, _COPIES = 256 * 2**20, 8


def machine(device: str) -> dict[str, Any]:
    """CPU, cores, memory, and its bandwidth on the worker's cores; on "cuda" also the GPU, its driver and its PCIe link with its measured
    speed.
    """
    cores = worker_place()[1]
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "logical_cores": os.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "available_gib": round(psutil.virtual_memory().available / 2**30, 1),
        "worker_cores": list(cores),
        "worker_gb_s": round(triad(cores), 1),
    }
    if device == "cuda":
        answer = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
        values = answer.partition("\n")[0].split(", ")
        found |= {"gpu": dict(zip(_GPU_FIELDS, values, strict=False)), "topology": _output("nvidia-smi", "topo", "-m")}
        found["pcie_gb_s"] = round(_measure_pcie(0), 1)
    return found


def summary(found: Mapping[str, Any]) -> str:
    """What `machine` has found that decides how fast a step is, in a few words."""
    words = [f"{found['cpu']}, {found['physical_cores']} physical cores, {found['memory_gib']:g} GiB"]
    # Former records have no such key.
    if "worker_gb_s" in found:
        words.append(f"{found['worker_gb_s']:g} GB/s on the worker's cores")
    if "gpu" in found:
        gpu = found["gpu"]
        link = f"PCIe {gpu.get('pcie.link.gen.current')}.0 x{gpu.get('pcie.link.width.current')}"
        words.append(f"driver {gpu.get('driver_version')}, {link} ({found['pcie_gb_s']:g} GB/s each way)")
    return "; ".join(words)


def _measure_pcie(index: int) -> float:
    """GB/s between page-locked host memory and a GPU in each direction while both copy: the slower one, by the GPU's own clock.

    Args:
        index: of the CUDA device.
    """
    device = torch.device("cuda", index)
    runtime = runtime_of(device)
    with torch.cuda.device(device):
        on_host = [torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        on_device = [torch.empty_like(memory, device=device) for memory in on_host]
        times = []
        for target, source in ((on_host[0], on_device[0]), (on_device[1], on_host[1])):
            with runtime.on(runtime.new_stream()):
                target.copy_(source, non_blocking=True)  # the first is not timed
                begin = runtime.record_event(timing=True)
                for _ in range(_COPIES):
                    target.copy_(source, non_blocking=True)
                times.append((begin, runtime.record_event(timing=True)))
        runtime.synchronize()
    return min(_COPIES * _COPY_BYTES / (1e6 * begin.elapsed_time(end)) for begin, end in times)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
