"""What does a method's bookkeeping cost: the part of a step that depends on the number of tensors, not on their sizes?

    python -m benchmarks.step_time.bookkeeping                        # under ten minutes on two cores
    python -m benchmarks.step_time.bookkeeping --params 25e6 --methods floor,zenflow --repeats 1

Trains a model on the CPU under every method. It has the tensors of a model of `--params` weights, but is so narrow that passes over memory
take no time. `floor` drops the gradients; the time above the floor are calls into DeepSpeed, torch and compiled code, and to other
processes. The model of full width is trained under the floor as well: forward and backward are the model's own step, and bookkeeping
is shown as a share of it.

Every process computes with one thread, as the trainer beside the worker does on two cores. Runs are interleaved, ratios and
differences are formed within a repeat, numbers are medians over the repeats. Prints a table; writes RESULTS/bookkeeping.json and .md.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import with_origin
from benchmarks.common.results import markdown, report
from benchmarks.step_time.methods import METHODS
from benchmarks.step_time.models import SHAPES, TimedGpt
from benchmarks.step_time.run import StepSpec, run

_DEFAULT_METHODS = [
    *("floor", "zero_offload", "deepspeed_zenflow", "zenflow", "zenflow_no_provisional", "zenflow_at_once"),
]
_OWN_STEP = "the model's own step"

Repeat = Mapping[str, Sequence[float]]
"""Seconds of the counted steps of each method, and of the wide model under the floor as `_OWN_STEP`."""


def table(repeats: Sequence[Repeat], n_tensors: int) -> str:
    """A row for each method."""
    rows = []
    for name in repeats[0]:
        median_ms = [1e3 * statistics.median(of_repeat[name]) for of_repeat in repeats]
        row = {
            "method": METHODS[name].title if name in METHODS else _OWN_STEP,
            "step ms": f"{statistics.median(median_ms):.1f}",
        }
        if name not in ("floor", _OWN_STEP):
            above = [m - 1e3 * statistics.median(r["floor"]) for m, r in zip(median_ms, repeats, strict=True)]
            # A pause in some steps, to select columns for instance, shows in the mean.
            means = [1e3 * (statistics.fmean(r[name]) - statistics.fmean(r["floor"])) for r in repeats]
            shares = [a / 1e3 / statistics.median(r[_OWN_STEP]) for a, r in zip(above, repeats, strict=True)]
            row["above floor ms"] = f"{statistics.median(above):.1f}"
            row["min..max"] = f"{min(above):.1f}..{max(above):.1f}"
            row["us a tensor"] = f"{1e3 * statistics.median(above) / n_tensors:.0f}"
            row["of the model's own step"] = f"{statistics.median(shares):.1%}"
            row["above floor, mean ms"] = f"{statistics.median(means):.1f}"
        rows.append(row)
    return markdown(rows)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.step_time.bookkeeping", __doc__)
    add = parser.add_argument
    add("--params", type=float, choices=list(SHAPES), default=150e6, help="weights of the model")
    add("--methods", type=list_of(one_of(METHODS, "method")), default=_DEFAULT_METHODS, metavar="NAME,...")
    add("--repeats", type=int, default=5)
    add("--steps", type=int, default=200, help="timed steps of the narrow model")
    add("--own-steps", type=int, default=16, help="timed steps of the model of full width")
    add("--timeout", type=float, default=300, help="limit of a run in seconds")
    parser.add_results()
    options = parser.parse(arguments)
    if "floor" not in options.methods:
        parser.error(f"--methods must contain 'floor', the baseline, got {','.join(options.methods)}")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All repeats; raises RuntimeError if a run fails."""

    def step_s(method: str, *, narrow: bool, steps: int) -> list[float]:
        spec = StepSpec(
            device="cpu",
            method=method,
            params=options.params,
            # Columns are selected, and selected again, in the warm-up.
            warm_up=max(2, steps // 5),
            steps=steps,
            narrow=narrow,
        )
        return run_process(run, spec, timeout=options.timeout, OMP_NUM_THREADS="1").step_s

    repeats: list[Repeat] = []
    for _ in range(options.repeats):
        times = {method: step_s(method, narrow=True, steps=options.steps) for method in options.methods}
        repeats.append({**times, _OWN_STEP: step_s("floor", narrow=False, steps=options.own_steps)})
    model = TimedGpt(steps=1, params=options.params, batch=1, tokens=1, narrow=True)
    return {"n_tensors": len(list(model.parameters())), "repeats": repeats}


def describe(written: Mapping[str, Any]) -> str:
    """The table of a result file."""
    n_tensors, repeats = written["n_tensors"], written["repeats"]
    lengths = f"{len(repeats)} repeats of {len(repeats[0]['floor'])} steps, interleaved"
    return with_origin(table(repeats, n_tensors), written, f"{n_tensors} tensors", lengths)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    report(parse_arguments(arguments), "bookkeeping", measure, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
