"""What does AdamW cost a CPU, per parameter and step? The worker's kernel beside DeepSpeed's and torch's, in turn, on the same cores.

    python -m benchmarks.kernel
    python -m benchmarks.kernel --elements 268435456 --repeats 9

* `replay`: the worker's own executable applies windows of S steps of bfloat16 gradients in one pass and publishes bfloat16 weights.
* `DeepSpeedCPUAdam`: what ZeRO-Offload does for one step: the clip pass over the 32-bit gradient, Adam, and the copy to bfloat16.
* `torch AdamW, fused`: one step of torch's fused CPU kernel and the same two passes.

The memory's speed is that of an in-place triad in the same run. Prints a table; writes RESULTS/kernel.json and .md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tabulate import tabulate

from benchmarks import records
from benchmarks.documents import RESULTS, update_document
from lightning_zenflow.native.paths import worker_executable

_BYTES_OF_ONE_STEP = 28
"""Read and write of master and moments, and the gradient in 32 bits; what the passes around it move comes on top."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26, help="parameters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    return parser.parse_args(arguments)


def measure_replay(elements: int, cores: Sequence[int]) -> tuple[float, dict[int, float]]:
    """GB/s of the triad, and for each S the ns a parameter and round."""
    command = [str(worker_executable()), "--bench", "--cores", ",".join(map(str, cores))]
    command += ["--elements", str(elements), "--repeats", "1"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    measured = [json.loads(line) for line in lines if "kernel" in line]
    triad = next(m["gb_per_s"] for m in measured if m["kernel"] == "triad")
    return triad, {m["steps"]: m["ns_per_parameter"] for m in measured if m["kernel"] == "replay"}


def triad_gb_per_s(written: Mapping[str, Any]) -> float:
    """The memory's speed that the shares in a result file refer to.

    Args:
        written: the file's content.
    """
    ns, share = (written[key]["DeepSpeedCPUAdam"] for key in ("ns", "share"))
    return median(_BYTES_OF_ONE_STEP / n / s for n, s in zip(ns, share, strict=True))


def one_step_of(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], elements: int
) -> Callable[[], float]:
    """A function that does one step with the passes around it, and returns its seconds."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments)
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    peers = {
        "DeepSpeedCPUAdam": one_step_of(lambda p: DeepSpeedCPUAdam(p, lr=1e-4, weight_decay=0.01), options.elements),
        "torch AdamW, fused": one_step_of(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), options.elements),
    }
    ns: dict[str, list[float]] = defaultdict(list)
    share: dict[str, list[float]] = defaultdict(list)
    against: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.repeats):
        triad, jobs = measure_replay(options.elements, cores)
        of_repeat = {f"replay, S={s}": (t, s, 26 + 2 * s) for s, t in jobs.items()}
        of_repeat |= {name: (1e9 * step() / options.elements, 1, _BYTES_OF_ONE_STEP) for name, step in peers.items()}
        deepspeed = of_repeat["DeepSpeedCPUAdam"][0]
        for name, (ns_of_round, n_steps, n_bytes) in of_repeat.items():
            ns[name].append(ns_of_round / n_steps)
            share[name].append(n_bytes / ns_of_round / triad)
            against[name].append(deepspeed * n_steps / ns_of_round)
    rows = [
        {
            "kernel": name,
            "ns a parameter and step": f"{median(ns[name]):.2f}",
            "min..max": f"{min(ns[name]):.2f}..{max(ns[name]):.2f}",
            "memory speed used": f"{median(share[name]):.0%}",
            "DeepSpeed's time / its": f"{median(against[name]):.1f}",
        }
        for name in ns
    ]
    versions = ", ".join(f"{name} {version}" for name, version in records.versions().items())
    text = (
        f"{tabulate(rows, headers='keys', tablefmt='github', disable_numparse=True)}\n\n"
        f"`python -m benchmarks.kernel {' '.join(sys.argv[1:] if arguments is None else arguments)}`\n\n"
        f"Commit {records.commit_of_code()}, {date.today().isoformat()}; {records.hardware()}, {len(cores)} threads;"
        f" {versions}; medians of {options.repeats} repeats.\n"
    )
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "kernel.md").write_text(text)
    written = {"hardware": records.hardware(), "ns": ns, "share": share, "against_deepspeed": against}
    (options.results / "kernel.json").write_text(json.dumps(written))
    update_document(records.ROOT / "docs" / "performance.md", {"kernel": text.strip()}, options.results)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
