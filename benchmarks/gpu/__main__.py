"""Tests, times and trains on a GPU: scripts/gpu, which finds the interpreter and installs what is missing, calls this.

    scripts/gpu tests                       pytest -m gpu
    scripts/gpu tests -x tests/gpu          arguments go to pytest
    scripts/gpu bench
    scripts/gpu train --trainer.max_steps=20    arguments go to examples/alpaca.py
    scripts/gpu glue --jobs 8 ...               arguments go to benchmarks.glue, which is no part of what follows

Each call ends within --minutes and goes on where the last one stopped. Results: benchmarks/results/gpu/.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common.results import RESULTS
from benchmarks.gpu.calls import Calls
from benchmarks.gpu.pack import find_worker
from lightning_zenflow.worker.machine import HOST_MEMORY

_PARTS = {"tests": ("suite", "run_tests"), "bench": ("bench", "run_bench"), "train": ("training", "run_training")}
"""Module and function; each imports what the others do not need."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(_PARTS))
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny case, to try the commands"
    )
    parser.add_argument("--minutes", type=float, default=8, help="length of a call")
    parser.add_argument("--again", action="store_true", help="drop the results of former calls")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", metavar="FOLDER")
    options, others = parser.parse_known_args(arguments)
    options.arguments = others
    if options.what == "bench" and options.arguments:
        parser.error(f"bench has no arguments {' '.join(options.arguments)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch of {sys.executable} sees no CUDA device")
    options.command = " ".join(["scripts/gpu", *(sys.argv[1:] if arguments is None else arguments)])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 0 when nothing is left and nothing has failed."""
    # Of torch: asks for devices without using them, so that forks of this process can use them.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = None if given[:1] == ["glue"] else parse_arguments(given)
    worker = find_worker()
    if worker is not None:
        os.environ.setdefault("LIGHTNING_ZENFLOW_WORKER", str(worker))
    if options is None:
        return int(importlib.import_module("benchmarks.glue.__main__").main(given[1:]))
    if options.what != "tests":
        # Virtual machines that are lent by the hour may grow with use. A run for which memory does not suffice fails by itself.
        os.environ.setdefault(HOST_MEMORY, "inf")
    name = "training" if options.what == "train" else options.what
    path = options.results.resolve() / f"{name}.json"
    calls = Calls(path, command=options.command, device=options.device, minutes=options.minutes, again=options.again)
    module, function = _PARTS[options.what]
    status: int = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(options, calls)
    return status


if __name__ == "__main__":
    sys.exit(main())
