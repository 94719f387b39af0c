"""Cost of AdamW on a CPU, per parameter and step: the worker's kernel beside DeepSpeed's and torch's, in turn, on the same cores.

    python -m benchmarks.kernel
    python -m benchmarks.kernel --elements 268435456 --repeats 9

* `replay`: a worker applies windows of S steps of bfloat16 gradients to one block in one pass and publishes bfloat16 weights.
* `one behind`: the same for one step, and publishes weights that are another, tentative, step ahead.
* `bfloat16 moments`, `int8 moments`: the same with both moments stored in so many bits.
* `DeepSpeedCPUAdam`: ZeRO-Offload's work for one step: the clip pass over the 32-bit gradient, Adam, and the copy to bfloat16.
* `torch AdamW, fused`: one step of torch's fused CPU kernel and the same two passes.

The memory bandwidth is that of an in-place triad in the same run. Prints a table; writes RESULTS/kernel.json.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from benchmarks.common.command_line import CommandLine
from benchmarks.common.provenance import with_origin
from benchmarks.common.results import markdown, report
from lightning_zenflow.cli import triad as measure_triad
from lightning_zenflow.core.partition import Slice, build_partition
from lightning_zenflow.core.step_inputs import GroupHyperparameters, step_word
from lightning_zenflow.native import TILE_ELEMENTS, Tentative
from lightning_zenflow.worker.arena import Arena, ArenaSizes
from lightning_zenflow.worker.process import JobMessage, Worker

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


_WINDOWS: Sequence[tuple[str, torch.dtype, Sequence[int]]] = (
    ("", torch.float32, (1, 2, 4, 8, 16)),
    (", bfloat16 moments", torch.bfloat16, (1,)),
    (", int8 moments", torch.int8, (1,)),
)
"""Names, types of moments, and steps of the windows."""
_GROUP = GroupHyperparameters(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)


def measure_replay(elements: int, cores: Sequence[int]) -> dict[str, Job]:
    """The worker's jobs by kernel and number of steps."""
    whole = Slice.of((elements,), parameter=0, param_group=0, begin=0, start=0, numel=elements)
    partition = build_partition([whole], [elements], n_blocks=1)
    jobs = {}
    for name, moments, windows in _WINDOWS:
        sizes = ArenaSizes(
            n_step_records=sum(windows) + 4,
            n_slots=max(2, *windows),
            n_publish_buffers=1,
            dtype=torch.bfloat16,
            moments_dtype=moments,
            n_threads=len(cores),
        )
        arena = Arena(partition, sizes, device=torch.device("cpu"))
        worker = Worker(arena, cores=cores, timeout_s=600, word_timeout_s=600)
        arena.master.fill_(0.5)
        arena.exp_avg_sq.write(0, torch.full((elements,), 1e-6))
        arena.exp_avg.write(0, torch.full((elements,), 1e-3))
        arena.slots.fill_(1e-3)
        step = 0
        # The first job touches the publish buffer.
        kinds = [("warm-up", 1, Tentative.PREDICTED), ("one behind", 1, Tentative.PREDICTED)]
        kinds += [("replay", n, Tentative.NONE) for n in windows]
        for job_id, (kernel, n_steps, tentative) in enumerate(kinds, start=1):
            n_gradients = n_steps + bool(tentative)
            for number in range(step + 1, step + n_gradients + 1):
                for is_second in (False, True):
                    arena.write_hyperparameters(number, [_GROUP], tentative=is_second)
                arena.step_words[number].copy_(step_word(torch.ones(()), number))
            arena.block_words[0].copy_(step_word(torch.ones(()), step + n_gradients))
            worker.submit(
                JobMessage(
                    job_id=job_id,
                    block=0,
                    first_step=step + 1,
                    slots=range(n_gradients),
                    publish_buffer=0,
                    prediction_steps=4.0,
                    tentative=tentative,
                )
            )
            step += n_steps
            of_moments = 4 * moments.itemsize + (16 / TILE_ELEMENTS if moments == torch.int8 else 0)
            n_bytes = 8 + of_moments + 2 * (n_gradients + 1)
            jobs[f"{kernel}{name}, S={n_steps}"] = Job(
                steps=n_steps, ns=worker.wait().busy_ns / elements, n_bytes=n_bytes
            )
        worker.close()
        arena.close(keep_state=False)
    return {name: job for name, job in jobs.items() if not name.startswith("warm-up")}


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


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.kernel", __doc__)
    parser.add_argument("--elements", type=int, default=1 << 26, help="parameters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_results("kernel")
    return parser.parse(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Of each kernel and repeat nanoseconds, share of the memory bandwidth, and speed relative to DeepSpeed's."""
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    peers = {
        "DeepSpeedCPUAdam": one_step_of(lambda p: DeepSpeedCPUAdam(p, lr=1e-4, weight_decay=0.01), options.elements),
        "torch AdamW, fused": one_step_of(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), options.elements),
    }
    ns: dict[str, list[float]] = defaultdict(list)
    share: dict[str, list[float]] = defaultdict(list)
    against: dict[str, list[float]] = defaultdict(list)
    triads: list[float] = []
    for _ in range(options.repeats):
        triad, jobs = measure_triad(cores), measure_replay(options.elements, cores)
        triads.append(triad)
        for name, step in peers.items():
            jobs[name] = Job(steps=1, ns=1e9 * step() / options.elements, n_bytes=BYTES_OF_ONE_STEP)
        deepspeed = jobs["DeepSpeedCPUAdam"].ns
        for name, job in jobs.items():
            ns[name].append(job.ns / job.steps)
            share[name].append(job.n_bytes / job.ns / triad)
            against[name].append(deepspeed * job.steps / job.ns)
    return {
        "threads": len(cores),
        "triad_gb_per_s": median(triads),
        "ns": ns,
        "share": share,
        "against_deepspeed": against,
    }


def describe(written: Mapping[str, Any]) -> str:
    """The table of a result file."""
    ns = written["ns"]
    rows = [
        {
            "kernel": name,
            "ns a parameter and step": f"{median(values):.2f}",
            "min..max": f"{min(values):.2f}..{max(values):.2f}",
            "memory speed used": f"{median(written['share'][name]):.0%}",
            "DeepSpeed's time / its": f"{median(written['against_deepspeed'][name]):.1f}",
        }
        for name, values in ns.items()
    ]
    notes = (
        f"{written['threads']} threads",
        f"triad of {written['triad_gb_per_s']:.1f} GB/s",
        f"medians of {len(ns['DeepSpeedCPUAdam'])} repeats",
    )
    return with_origin(markdown(rows), written, *notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    report(parse_arguments(arguments), measure, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
