"""Measured speeds of this machine: PCIe in both directions, host memory, and the worker's AdamW. A few seconds."""

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.native.paths import worker_executable
from lightning_zenflow.worker.cores import worker_cores
from lightning_zenflow.worker.memory import free_host_memory
from lightning_zenflow.worker.process import worker_environment
from lightning_zenflow.worker.topology import core_siblings, read_place

_COPY_BYTES = 256 * 2**20
_COPIES = 8

_LARGEST_ELEMENTS = 1 << 25
"""Of the worker's benchmark: 256 MiB are read and written by its triad, more than caches hold."""

_BENCH_BYTES = 32
"""Of host memory for an element of it, rounded up."""

_REPEATS = 3
_LONGEST_WINDOW = 4
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """Copies between a GPU and page-locked host memory, in GB/s."""

    d2h_gb_s: float
    h2d_gb_s: float
    both_gb_s: float
    """Of each direction while both copy."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The worker's executable on the cores that it would get beside one rank."""

    path: str
    instruction_set: str
    cores: tuple[int, ...]
    memory_gb_s: float
    """Memory bandwidth, by a triad in place: 12 bytes an element."""
    update_ns: dict[int, float]
    """Time of AdamW for one parameter and step, by the window S whose steps it applies in one pass."""


def measure_pcie(index: int) -> Pcie:
    """Copies between host memory and a GPU, with the GPU's own clock.

    Args:
        index: of the CUDA device.
    """
    device = torch.device("cuda", index)
    runtime = runtime_of(device)
    with torch.cuda.device(device):
        on_host = [torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        on_device = [torch.empty_like(memory, device=device) for memory in on_host]
        streams = [runtime.new_stream() for _ in range(2)]

        def gb_per_s(*directions: str) -> float:
            """Slowest of the directions, after one copy that is not timed."""
            times = []
            for direction, stream, host, far in zip(directions, streams, on_host, on_device, strict=False):
                source, target = (far, host) if direction == "d2h" else (host, far)
                with runtime.on(stream):
                    target.copy_(source, non_blocking=True)
                    begin = runtime.record_event(timing=True)
                    for _ in range(_COPIES):
                        target.copy_(source, non_blocking=True)
                    times.append((begin, runtime.record_event(timing=True)))
            runtime.synchronize()
            return min(_COPIES * _COPY_BYTES / (1e6 * begin.elapsed_time(end)) for begin, end in times)

        return Pcie(d2h_gb_s=gb_per_s("d2h"), h2d_gb_s=gb_per_s("h2d"), both_gb_s=gb_per_s("d2h", "h2d"))


def measure_worker(device: torch.device, reserved_share: float) -> Worker:
    """Runs the worker's own benchmark on the cores that it would get beside one rank.

    Args:
        device: of that rank.
        reserved_share: of the cores for the trainer (`pt_reserved_cores_perc`).

    Raises:
        RuntimeError: the executable is missing, fails, or takes too long.
    """
    place = read_place(device)
    cores = worker_cores(
        "auto", places=[place], index=0, siblings=core_siblings(place.allowed), reserved_share=reserved_share
    ).cores
    path = worker_executable()
    command = [str(path), "--bench", "--cores", ",".join(map(str, cores)), "--elements", str(_elements())]
    command += ["--repeats", str(_REPEATS), "--max-steps", str(_LONGEST_WINDOW)]
    try:
        done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the worker's benchmark did not end: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"the worker's benchmark failed with status {done.returncode}: {done.stderr.strip()}")
    head, *lines = map(json.loads, done.stdout.splitlines())
    return Worker(
        path=str(path),
        instruction_set=head["instruction_set"],
        cores=tuple(cores),
        memory_gb_s=median(_of(lines, "triad", 0, "gb_per_s")),
        update_ns={s: median(_of(lines, "replay", s, "ns_per_parameter")) / s for s in (1, 2, 4)},
    )


def _of(lines: Sequence[dict[str, float | str]], kernel: str, n_steps: int, key: str) -> list[float]:
    return [float(line[key]) for line in lines if line["kernel"] == kernel and line["steps"] == n_steps]


def _elements() -> int:
    """As many as half of the free memory holds, at most `_LARGEST_ELEMENTS`; a power of two."""
    free = free_host_memory()
    if free is None or math.isinf(free.n_bytes):
        return _LARGEST_ELEMENTS
    fitting = int(free.n_bytes / 2 / _BENCH_BYTES)
    return min(_LARGEST_ELEMENTS, 1 << max(16, fitting.bit_length() - 1))
