"""Does training survive an hour of disturbances? Compares bits with an undisturbed run, and checks that memory stays flat.

    python -m benchmarks.reliability --minutes 60

The disturbed run consists of legs, each resumed from the checkpoint of the last. Its worker is killed at random instants, and more
checkpoints are saved at random steps. The undisturbed run saves at the same steps, since a save closes the open windows. Prints the
result; writes RESULTS/soak.json. The exit status is 1 if the bits differ, memory grows or a worker is left.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.command_line import CommandLine
from benchmarks.common.provenance import about
from benchmarks.reliability.training import Disturbances, Memory, Saves, fit, state_of, workers

LARGEST_GROWTH = 0.05
"""Relative growth of the memory from the first to the last third of the run."""
_DISTURBED_SHARE = 0.8
"""Of the time; the rest is enough for the same steps without disturbance."""


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs both trainings; returns the content of the result file, without the provenance."""
    rng = random.Random(options.seed)
    memory = Memory()
    begin = time.monotonic()
    step = restarts = kills = legs = 0
    saves: list[int] = []
    disturbed, undisturbed = folder / "disturbed", folder / "undisturbed"
    while legs < 3 or time.monotonic() - begin < 60 * options.minutes * _DISTURBED_SHARE:
        last_step = step + options.leg_steps
        in_leg = [*sorted(rng.sample(range(step + 1, last_step), 2)), last_step]
        disturbances = Disturbances(rng, options.kill_every, memory, last_step)
        resumed = disturbed / "leg" if legs else None
        restarts += fit(options.width, last_step, resumed, disturbances, Saves(in_leg, disturbed))
        saves += in_leg
        kills += disturbances.kills
        step, legs = last_step, legs + 1
    disturbed_s = time.monotonic() - begin
    fit(options.width, step, None, Saves(saves, undisturbed))
    found, expected = state_of(disturbed / "leg"), state_of(undisturbed / "leg")
    growth = {name: Memory.growth(samples) for name, samples in asdict(memory).items()}
    return {
        "minutes": (time.monotonic() - begin) / 60,
        "seed": options.seed,
        "steps": step,
        "legs": legs,
        "saves": len(saves),
        "kills": kills,
        "restarts": restarts,
        "steps_per_s_disturbed": step / disturbed_s,
        "tensors": len(expected),
        "same_bits": len(found) == len(expected) and all(map(torch.equal, found, expected)),
        "memory_mib": {name: [round(n / 2**20, 1) for n in samples] for name, samples in asdict(memory).items()},
        "memory_growth": growth,
        "memory_flat": all(g < LARGEST_GROWTH for g in growth.values()),
        "workers_left": len(workers()),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line, or from `arguments`."""
    parser = CommandLine("benchmarks.reliability", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="of both runs together, approximately; default 60")
    add("--seed", type=int, default=0)
    add("--width", type=int, default=512, help="of the model's layers; default 512")
    add("--leg-steps", type=int, default=200, help="steps from one resume to the next; default 200")
    add("--kill-every", type=int, default=10, help="steps from one kill to the next on average; default 10")
    parser.add_results(report_only=False)
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        result = {**about(options.command), **soak(options, Path(folder))}
    text = json.dumps(result, indent=2)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "soak.json").write_text(text + "\n")
    return 0 if result["same_bits"] and result["memory_flat"] and not result["workers_left"] else 1


if __name__ == "__main__":
    sys.exit(main())
