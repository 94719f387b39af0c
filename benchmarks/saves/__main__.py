"""How long does a save stop training, and how much slower are steps while a checkpoint is written?

    python -m benchmarks.saves
    python -m benchmarks.saves --params 151e6,600e6 --folder /mnt/disk

Trains on the simulated accelerator of `benchmarks.step_time`, which computes while the host works, with S = 1, d = 0: once for each size
and each way to save. A save is timed from its call; with `async_checkpoints` and with torch's `async_save`, which gets the same tensors, it
goes on behind the call. Prints a table; writes RESULTS/saves.json.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.common.command_line import CommandLine, list_of
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import with_origin
from benchmarks.common.results import markdown, report
from benchmarks.saves.run import KINDS, SavesResult, SavesSpec, run

_COMPUTE_S = 540e-3 / 151e6
"""Seconds that a step computes, a weight: that of the step-time tables."""

_NAMES = {
    "synchronous": "ZenFlowStrategy",
    "background": "ZenFlowStrategy, `async_checkpoints`",
    "dcp": "torch.distributed.checkpoint.async_save",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.saves", __doc__)
    add = parser.add_argument
    add("--params", type=list_of(float), default=[151e6, 600e6], metavar="WEIGHTS,...")
    add("--saves", type=int, default=3, help="in each run")
    add("--between", type=int, default=8, help="steps between two saves, while nothing is written")
    add("--timeout", type=float, default=1800, help="limit of a run in seconds")
    add("--folder", default=tempfile.gettempdir(), help="on the disk to which checkpoints are written")
    parser.add_results("saves")
    return parser.parse(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs every way to save for every size: `runs`."""
    runs: list[SavesResult] = []
    for params in options.params:
        for kind in KINDS:
            spec = SavesSpec(
                kind=kind,
                params=params,
                compute_s=_COMPUTE_S * params,
                saves=options.saves,
                between=options.between,
            )
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                runs.append(run_process(run, spec, folder, timeout=options.timeout))
            print(f"{params:g} {kind}: {runs[-1].call_s}", flush=True)
    return {"runs": runs}


def describe(written: Mapping[str, Any]) -> str:
    """The table of a result file."""
    rows = []
    for values in written["runs"]:
        r = SavesResult(**{**values, "spec": SavesSpec(**values["spec"])})
        step_s, busy = mean(r.quiet_step_s), r.busy_step_s
        rows.append(
            {
                "weights": f"{r.spec.params / 1e6:.0f}M",
                "save": _NAMES[r.spec.kind],
                "GB": f"{r.n_bytes / 1e9:.2f}",
                "call, s": f"{median(r.call_s):.2f}",
                "in steps": f"{median(r.call_s) / step_s:.1f}",
                "complete after, s": f"{median(r.written_s):.1f}",
                "step, ms": f"{1e3 * step_s:.0f}",
                "step while written, ms": f"{1e3 * mean(busy):.0f}" if busy else "",
                "ratio": f"{mean(busy) / step_s:.2f}" if busy else "",
            }
        )
    return with_origin(markdown(rows), written, "medians of the saves and means of the steps of one run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    report(parse_arguments(arguments), measure, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
