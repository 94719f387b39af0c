"""How long does a step take, and how much of it is waiting? The same model under every method, each run in a process of its own.

    python -m benchmarks.step_time                                # on CUDA if there is any, else on the simulated accelerator
    python -m benchmarks.step_time --device simulated --params 150e6 --compute-ms 540
    python -m benchmarks.step_time --device cpu --params 150e6 --tokens 16
    python -m benchmarks.step_time --methods floor,zenflow --repeats 1

Runs are interleaved: every method once, then every method again. Numbers are medians over the repeats, ratios are formed within each
repeat. Methods that do not apply to a device are not among its defaults, and are refused by name. Prints a table; writes
RESULTS/step_time_NAME.json (every step of every run), .md and .png.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import records
from benchmarks.convergence import names_of
from benchmarks.documents import RESULTS, update_document
from benchmarks.processes import run_process
from benchmarks.step_methods import METHODS
from benchmarks.step_report import write_report
from benchmarks.step_run import StepResult, StepSpec, result_of

DOCUMENT = records.ROOT / "docs" / "performance.md"

_DEFAULT_METHODS = {
    "simulated": [
        "floor",
        "zero_offload",
        "deepspeed_zenflow",
        "zenflow",
        "zenflow_no_stand_in",
        "zenflow_auto",
        "zenflow_at_once",
        "zenflow_at_the_end",
    ],
    "cpu": ["none", "zero_offload", "deepspeed_zenflow", "zenflow", "zenflow_auto", "zenflow_at_once"],
    "cuda": [
        "none",
        "zero_offload",
        "deepspeed_zenflow",
        "torchao",
        "zenflow",
        "zenflow_no_stand_in",
        "zenflow_auto",
        "zenflow_at_once",
    ],
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=list(_DEFAULT_METHODS), default="cuda" if torch.cuda.is_available() else "simulated")
    add("--params", type=float, default=150e6, help="weights; for cpu and cuda one of 25e6, 150e6, 1.5e9, 3e9")
    add("--batch", type=int, default=1, help="sequences a step")
    add("--tokens", type=int, default=16, help="length of a sequence")
    add("--compute-ms", type=float, default=540.0, help="forward and backward of the simulated accelerator")
    add("--methods", type=names_of(list(METHODS), "method"), metavar="NAME,...")
    add("--repeats", type=int, default=3)
    add("--steps", type=int, default=24, help="steps that are timed")
    add("--warm-up", type=int, default=8, help="steps before them")
    add("--timeout", type=float, default=900, help="longest time of a run in seconds")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER")
    add("--name", help="of the result files; default: made of device and size")
    options = parser.parse_args(arguments)
    options.methods = options.methods or _DEFAULT_METHODS[options.device]
    for name in options.methods:
        reason = METHODS[name].not_on.get(options.device)
        if reason is not None:
            parser.error(f"--methods {name} does not apply to --device {options.device}: {reason}")
    options.name = options.name or f"{options.device}_{options.params / 1e6:g}M_{options.batch}x{options.tokens}"
    return options


def run(spec: StepSpec, timeout: float, **environment: str) -> StepResult | str:
    """One run; what went wrong if it failed."""
    cores = sorted(os.sched_getaffinity(0))
    arguments = [json.dumps(vars(spec))]
    ended = run_process("benchmarks.step_run", arguments, cores=cores, environment=environment, timeout=timeout)
    if ended.result is None:
        return ended.error
    return result_of(json.loads(ended.result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a run failed."""
    options = parse_arguments(arguments)
    results: list[list[StepResult]] = []
    failures: dict[str, str] = {}
    start = time.perf_counter()
    for repeat in range(options.repeats):
        results.append([])
        for method in options.methods:
            auto = method.startswith("zenflow_auto")
            spec = StepSpec(
                device=options.device,
                method=method,
                params=options.params,
                batch=options.batch,
                tokens=options.tokens,
                compute_s=options.compute_ms / 1e3,
                # It measures for some 25 steps before it decides.
                warm_up=options.warm_up + (64 if auto else 0),
                steps=options.steps,
            )
            result = run(spec, options.timeout)
            minutes = (time.perf_counter() - start) / 60
            if isinstance(result, str):
                failures[method] = result
                print(f"[{repeat + 1}/{options.repeats}, {minutes:.1f} min] {method}: FAILED: {result}", flush=True)
                continue
            results[-1].append(result)
            mean_ms = 1e3 * sum(result.step_s) / len(result.step_s)
            print(f"[{repeat + 1}/{options.repeats}, {minutes:.1f} min] {method}: {mean_ms:.0f} ms a step", flush=True)
    about = records.about("benchmarks.step_time", arguments, hardware=_hardware(options.device))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"step_time_{options.name}.json"
    runs = [[dataclasses.asdict(result) for result in of_repeat] for of_repeat in results]
    path.write_text(json.dumps({**about, "failures": failures, "runs": runs}))
    text = write_report(results, about, path)
    update_document(DOCUMENT, {path.stem: text.strip()}, options.results)
    print(text)
    return 1 if failures else 0


def _hardware(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, {records.hardware()}"
    return records.hardware()


if __name__ == "__main__":
    sys.exit(main())
