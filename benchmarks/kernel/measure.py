"""Kernels of AdamW on the CPU: the worker's, and steps of other optimizers with the passes around them."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_zenflow.native.paths import worker_executable

BYTES_OF_ONE_STEP = 28
"""Reads and writes of master weights and moments, and the 32-bit gradient; passes around the step are not counted."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """An update job of the worker's kernel."""

    steps: int
    ns: float
    """Nanoseconds a parameter."""
    n_bytes: float
    """Reads and writes a parameter."""


def measure_replay(elements: int, cores: Sequence[int]) -> tuple[float, dict[str, Job]]:
    """GB/s of the triad, and the jobs by kernel and number of steps."""
    command = [str(worker_executable()), "--bench", "--cores", ",".join(map(str, cores))]
    command += ["--elements", str(elements), "--repeats", "1"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    triad, *measured = [json.loads(line) for line in lines if "kernel" in line]
    return triad["gb_per_s"], {
        f"{m['kernel']}, S={m['steps']}": Job(
            steps=m["steps"], ns=m["ns_per_parameter"], n_bytes=m["bytes_per_parameter"]
        )
        for m in measured
    }


def one_step_of(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], elements: int
) -> Callable[[], float]:
    """A function that performs one step with the passes around it, and returns its seconds."""
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements)
    published = torch.empty(elements, dtype=torch.bfloat16)
    optimizer = make([parameter])

    def step() -> float:
        begin = time.perf_counter()
        assert parameter.grad is not None
        parameter.grad.mul_(0.999)
        optimizer.step()
        published.copy_(parameter.detach())
        return time.perf_counter() - begin

    step()  # creates the moments
    return step
