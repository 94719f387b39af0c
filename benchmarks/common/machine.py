"""The machine of a measurement in detail."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

_GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
)
_COPIED = 1 << 30


def machine(device: str) -> dict[str, Any]:
    """CPU, cores and memory; on "cuda" also the GPU, its driver and its PCIe link with measured speeds."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "logical_cores": os.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "available_gib": round(psutil.virtual_memory().available / 2**30, 1),
    }
    if device == "cuda":
        answer = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
        values = answer.partition("\n")[0].split(", ")
        found |= {"gpu": dict(zip(_GPU_FIELDS, values, strict=False)), "topology": _output("nvidia-smi", "topo", "-m")}
        found["pcie_gb_s"] = pcie_gb_s()
    return found


def summary(found: Mapping[str, Any]) -> str:
    """What `machine` has found that decides how fast a step is, in a few words."""
    words = [f"{found['cpu']}, {found['physical_cores']} physical cores, {found['memory_gib']:g} GiB"]
    if "gpu" in found:
        gpu, speed = found["gpu"], found["pcie_gb_s"]
        link = f"PCIe {gpu.get('pcie.link.gen.current')}.0 x{gpu.get('pcie.link.width.current')}"
        words.append(f"driver {gpu.get('driver_version')}, {link} (d2h {speed['d2h']:g}, h2d {speed['h2d']:g} GB/s)")
    return "; ".join(words)


def pcie_gb_s() -> dict[str, float]:
    """Speed of a copy of 1 GiB between page-locked memory and the device, in 1e9 bytes a second."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    speeds = {}
    for name, target, source in (("h2d", on_device, host), ("d2h", host, on_device)):
        target.copy_(source, non_blocking=True)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        speeds[name] = round(_COPIED / 1e6 / begin.elapsed_time(end), 1)
    return speeds


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
