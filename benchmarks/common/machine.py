"""The machine of a measurement in detail."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from lightning_zenflow.doctor.speed import measure_pcie

_GPU_FIELDS = (
    *("name", "driver_version", "memory.total"),
    *(f"pcie.link.{what}" for what in ("gen.current", "gen.max", "width.current")),
)


def machine(device: str) -> dict[str, Any]:
    """CPU, cores and memory; on "cuda" also the GPU, its driver and its PCIe link with its measured speed."""
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
        found["pcie_gb_s"] = round(measure_pcie(0), 1)
    return found


def summary(found: Mapping[str, Any]) -> str:
    """What `machine` has found that decides how fast a step is, in a few words."""
    words = [f"{found['cpu']}, {found['physical_cores']} physical cores, {found['memory_gib']:g} GiB"]
    if "gpu" in found:
        gpu = found["gpu"]
        link = f"PCIe {gpu.get('pcie.link.gen.current')}.0 x{gpu.get('pcie.link.width.current')}"
        words.append(f"driver {gpu.get('driver_version')}, {link} ({found['pcie_gb_s']:g} GB/s each way)")
    return "; ".join(words)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
