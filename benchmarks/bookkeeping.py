"""What a method's bookkeeping costs: everything in a step that is there because the model has many tensors, not because they are large.

    python -m benchmarks.bookkeeping                                  # under ten minutes on two cores
    python -m benchmarks.bookkeeping --params 25e6 --methods floor,zenflow --repeats 1

A model with the tensors of one of `--params` weights, but so narrow that passes over memory take no time, is trained on the CPU under every
method; `floor` drops the gradients. What a method takes above the floor are calls: into DeepSpeed, torch and compiled code, and to
other processes. The model of full width is trained under the floor as well: that step is the model's own, forward and backward, and
bookkeeping is shown as a share of it.

Every process computes with `--threads` threads: the trainer beside our worker has that many on two cores. Runs are interleaved, ratios and
differences are formed within a repeat, numbers are medians over the repeats. Prints a table; writes RESULTS/bookkeeping.json and .md.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks import records
from benchmarks.accelerator import SHAPES, Gpt
from benchmarks.convergence import names_of
from benchmarks.documents import RESULTS, update_document
from benchmarks.step_methods import METHODS
from benchmarks.step_run import StepResult, StepSpec
from benchmarks.step_time import DOCUMENT, run

_DEFAULT_METHODS = ["floor", "zero_offload", "deepspeed_zenflow", "zenflow", "zenflow_no_stand_in", "zenflow_at_once"]
_OWN_STEP = "the model's own step"

Repeat = Mapping[str, Sequence[float]]
"""Times of the counted steps, in seconds, of each method; and of the wide model under the floor, as `_OWN_STEP`."""


def table(repeats: Sequence[Repeat], n_tensors: int) -> str:
    """One row a method."""
    rows = []
    for name in repeats[0]:
        median_ms = [1e3 * statistics.median(of_repeat[name]) for of_repeat in repeats]
        row = {"method": METHODS[name].title if name in METHODS else _OWN_STEP}
        row["step ms"] = f"{statistics.median(median_ms):.1f}"
        if name not in ("floor", _OWN_STEP):
            above = [
                m - 1e3 * statistics.median(of_repeat["floor"]) for m, of_repeat in zip(median_ms, repeats, strict=True)
            ]
            # A pause that some steps have, to select columns for instance, shows in the mean.
            means = [
                1e3 * (statistics.fmean(of_repeat[name]) - statistics.fmean(of_repeat["floor"]))
                for of_repeat in repeats
            ]
            own_ms = [1e3 * statistics.median(of_repeat[_OWN_STEP]) for of_repeat in repeats]
            shares = [100 * a / own for a, own in zip(above, own_ms, strict=True)]
            row["above floor ms"] = f"{statistics.median(above):.1f}"
            row["min..max"] = f"{min(above):.1f}..{max(above):.1f}"
            row["us a tensor"] = f"{1e3 * statistics.median(above) / n_tensors:.0f}"
            row["of the model's own step"] = f"{statistics.median(shares):.1f}%"
            row["above floor, mean ms"] = f"{statistics.median(means):.1f}"
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval="")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--params", type=float, choices=list(SHAPES), default=150e6, help="weights of the model")
    add("--tokens", type=int, default=16, help="length of a sequence")
    add("--methods", type=names_of(list(METHODS), "method"), default=_DEFAULT_METHODS, metavar="NAME,...")
    add("--threads", type=int, default=1)
    add("--repeats", type=int, default=5)
    add("--steps", type=int, default=200, help="steps of the narrow model that are timed")
    add("--own-steps", type=int, default=16, help="steps of the model of full width that are timed")
    add("--timeout", type=float, default=300, help="longest time of a run in seconds")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if "floor" not in options.methods:
        parser.error("--methods: allowed are lists with 'floor', which the others are compared with")
    return options


def measure(options: argparse.Namespace) -> Repeat:
    """One repeat.

    Raises:
        RuntimeError: a run failed.
    """

    def step_s(method: str, *, narrow: bool, steps: int) -> list[float]:
        spec = StepSpec(
            device="cpu",
            method=method,
            params=options.params,
            batch=1,
            tokens=options.tokens,
            compute_s=0.0,
            # So many that columns were selected, and selected again.
            warm_up=max(2, steps // 5),
            steps=steps,
            narrow=narrow,
        )
        result = run(spec, options.timeout, OMP_NUM_THREADS=str(options.threads))
        if not isinstance(result, StepResult):
            raise RuntimeError(f"{method}: {result}")
        return result.step_s

    times = {method: step_s(method, narrow=True, steps=options.steps) for method in options.methods}
    return {**times, _OWN_STEP: step_s("floor", narrow=False, steps=options.own_steps)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parse_arguments(arguments)
    repeats = [measure(options) for _ in range(options.repeats)]
    n_tensors = len(list(Gpt(steps=1, params=options.params, batch=1, tokens=options.tokens, narrow=True).parameters()))
    about = records.about("benchmarks.bookkeeping", arguments, hardware=records.hardware())
    text = (
        records.with_origin(table(repeats, n_tensors), about)
        + f"; {n_tensors} tensors; {len(repeats)} repeats of {options.steps} steps, interleaved."
    )
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "bookkeeping.json"
    path.write_text(json.dumps({**about, "n_tensors": n_tensors, "repeats": repeats}))
    path.with_suffix(".md").write_text(text + "\n")
    update_document(DOCUMENT, {path.stem: text}, options.results)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
