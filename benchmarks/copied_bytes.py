"""Bytes that were copied between a CUDA device and host memory, by torch's profiler: the same measure for every method."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_DOWN, _UP = "Memcpy DtoH", "Memcpy HtoD"
"""How the names of these events begin; what kind of host memory it is follows."""


def copied_bytes(events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Sums up the copies of a trace.

    Args:
        events: `traceEvents` of a Chrome trace as torch's profiler writes it.

    Returns:
        Bytes from device to host, and from host to device. Kernels that read or write host memory themselves are not in them.
    """
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    down, up = (sum(e["args"]["bytes"] for e in copies if e["name"].startswith(way)) for way in (_DOWN, _UP))
    return down, up


class CopyMeter:
    """Measures what is copied from `start` to `stop`, each of which waits for the device."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begins."""
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> tuple[int, int]:
        """Ends; returns what `copied_bytes` does."""
        torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return copied_bytes(json.loads(path.read_text())["traceEvents"])
