"""Bytes copied between a CUDA device and host memory, by torch's profiler: the same measure for every method."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_D2H, _H2D = "Memcpy DtoH", "Memcpy HtoD"
"""First words of these events' names; the kind of host memory follows."""


def copied_bytes(events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Sums the copies of a trace.

    Args:
        events: `traceEvents` of a Chrome trace as torch's profiler writes it.

    Returns:
        Bytes from device to host, and from host to device. Accesses of kernels to host memory are not counted.
    """
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    d2h, h2d = (sum(e["args"]["bytes"] for e in copies if e["name"].startswith(way)) for way in (_D2H, _H2D))
    return d2h, h2d


class CopyMeter:
    """Counts copied bytes from `start` to `stop`, each of which synchronizes the device."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> tuple[int, int]:
        """Returns bytes from device to host, and from host to device."""
        torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return copied_bytes(json.loads(path.read_text())["traceEvents"])
