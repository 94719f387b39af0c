"""Measured speeds of this machine: PCIe, host memory, and the worker's AdamW. A few seconds."""

import json
import subprocess
from dataclasses import dataclass
from statistics import median

import torch

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.native.paths import worker_executable
from lightning_zenflow.worker.cores import worker_cores
from lightning_zenflow.worker.process import worker_environment
from lightning_zenflow.worker.topology import core_siblings, read_place

_COPY_BYTES, _COPIES = 256 * 2**20, 8

_ELEMENTS = 1 << 24
"""Of the worker's benchmark: 128 MiB are read and written by its triad, more than most caches hold; all its arrays take 512 MiB."""

_BENCH_OPTIONS = ("--repeats", "3", "--max-steps", "4")

_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """The worker's executable on the cores that it would get beside one rank."""

    instruction_set: str
    cores: tuple[int, ...]
    memory_gb_s: float
    """Memory bandwidth, by a triad in place: 12 bytes an element."""
    update_ns: dict[int, float]
    """Time of AdamW for one parameter and step, by the window S whose steps it applies in one pass."""
    coded_ns: float
    """The same at S = 1 with moments in 8 bits."""


def measure_pcie(index: int) -> float:
    """GB/s between page-locked host memory and a GPU in each direction while both copy: the slower one, by the GPU's own clock.

    Args:
        index: of the CUDA device.
    """
    device = torch.device("cuda", index)
    runtime = runtime_of(device)
    with torch.cuda.device(device):
        on_host = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
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


def measure_worker(device: torch.device, reserved_share: float) -> WorkerSpeed:
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

    return WorkerSpeed(
        instruction_set=head["instruction_set"],
        cores=tuple(cores),
        memory_gb_s=of("triad", 0, "gb_per_s"),
        update_ns={s: of("replay", s, "ns_per_parameter") / s for s in (1, 2, 4)},
        coded_ns=of("replay, int8 moments", 1, "ns_per_parameter"),
    )
