"""How long does a step take, and how much of it is waiting? Times the same model under every method, each run in a process of its own.

    python -m benchmarks.step_time                                # on CUDA if available, else on the simulated accelerator
    python -m benchmarks.step_time --device simulated --params 150e6 --compute-ms 540
    python -m benchmarks.step_time --device simulated --params 150e6 --embedding --methods floor,zero_offload,zenflow_auto
    python -m benchmarks.step_time --device simulated --params 150e6 --asynchronous --methods floor,zero_offload,zenflow_exact
    python -m benchmarks.step_time --device simulated --params 151e6 --asynchronous --ranks 2 --worker-shares 0.3,0.5,0.7
    python -m benchmarks.step_time --params 151e6 --asynchronous --stage 3 --worker-shares 0.5,0.7,0.8,0.9 --share-of step
    python -m benchmarks.step_time --device cpu --params 150e6 --tokens 16
    python -m benchmarks.step_time --device cpu --params 150e6 --narrow --methods floor,zero_offload,zenflow,zenflow_exact --steps 200
    python -m benchmarks.step_time --methods floor,zenflow --repeats 1

Runs are interleaved: every method once, then every method again. Numbers are medians over the repeats, ratios are formed within each
repeat. With `--worker-shares` a first run, whose steps are long, measures the worker's pass, and everything is timed with backward passes
(or with `--share-of step` with forward and backward passes) of which the pass is such a part; of several ranks the pass of all of them one
after the other, if they share the workers' cores. Methods that do not apply to a device are not among its defaults, and are refused by
name. With `--narrow` a method's time above the floor is its bookkeeping: calls into DeepSpeed, torch and compiled code, and to other
processes, which depend on the number of tensors; every process computes with one thread then, as the trainer beside the worker does on two
cores. Prints a table; writes RESULTS/NAME.json, every step of every run.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.cpu_adam import compile_cpu_adam
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import with_origin
from benchmarks.common.results import report
from benchmarks.step_time.methods import DECIDING, DEVICES, METHODS, OF_RANKS, OF_STAGE_3
from benchmarks.step_time.models import PART_OF_STEP, RESIDENT_BYTES
from benchmarks.step_time.report import tables
from benchmarks.step_time.run import StepResult, StepSpec, results_of, run

_ALONE_S = 2.0
"""Seconds that a step computes while the worker's pass is measured: few jobs of several ranks fall together then."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.step_time", __doc__)
    add = parser.add_argument
    add("--device", choices=list(DEVICES), default="cuda" if torch.cuda.is_available() else "simulated")
    add("--params", type=float, default=150e6, help="weights; for cpu and cuda one of 25e6, 150e6, 1.5e9, 3e9, 7e9")
    add("--batch", type=int, default=1, help="sequences in a step")
    add("--tokens", type=int, default=16, help="length of a sequence")
    add("--compute-ms", type=float, default=540.0, help="forward and backward; this and what follows of simulated ones")
    add("--narrow", action="store_true", help="on cpu and cuda: all tensors of the model, but hardly any weights")
    add("--embedding", action="store_true", help="15 %% of the weights are an embedding, whose gradient comes last")
    add("--asynchronous", action="store_true", help="the device computes while the host copies, as a GPU does")
    add("--ranks", type=int, default=1, help="devices, on this host")
    add("--worker-shares", type=list_of(float), metavar="SHARE,...", help="the worker's pass; replaces --compute-ms")
    add("--share-of", choices=list(PART_OF_STEP), default="backward", help="what --worker-shares are parts of")
    add("--stage", type=int, choices=[2, 3], default=2, help="of ZeRO, for the methods by default")
    add("--pcie", type=float, default=25.0, help="GB/s at which the simulated accelerator fetches parameters")
    add("--device-memory", type=float, default=1000.0, help="GB/s, for the simulated update of resident blocks")
    add("--worker-cores", type=list_of(int), default=[], metavar="CORE,...", help="of all ranks' workers")
    add("--methods", type=list_of(one_of(METHODS, "method")), metavar="NAME,...")
    add("--repeats", type=int, default=3)
    add("--steps", type=int, default=24, help="timed steps")
    add("--warm-up", type=int, default=8, help="steps before them")
    add("--timeout", type=float, default=900, help="limit of a run in seconds")
    parser.add_results("step_time")
    options = parser.parse(arguments)
    by_default = OF_STAGE_3 if options.stage == 3 else OF_RANKS if options.ranks > 1 else DEVICES[options.device]
    options.methods = options.methods or by_default
    for name in options.methods:
        reason = METHODS[name].not_on.get(options.device)
        if reason is not None:
            parser.error(f"--methods {name} does not apply to --device {options.device}: {reason}")
    of_simulated = [name for name in ("embedding", "asynchronous", "worker_shares") if getattr(options, name)]
    of_simulated += ["ranks"] if options.ranks > 1 else []
    if of_simulated and options.device != "simulated":
        name = of_simulated[0].replace("_", "-")
        parser.error(f"--{name} applies to --device simulated only, got --device {options.device}")
    if options.ranks > 1 and any(METHODS[name].stage == 3 for name in options.methods):
        parser.error(
            f"--ranks must be 1 with methods of stage 3, whose fetches are simulated for one, got {options.ranks}"
        )
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs every method in every repeat: `runs`, of each repeat a list of results; `failures` and `unavailable`, method -> reason."""
    runs: list[list[StepResult]] = []
    failures: dict[str, str] = {}
    if any(METHODS[name].peer for name in options.methods):
        compile_cpu_adam()
    start = time.perf_counter()
    computes_s = {0.0: options.compute_ms / 1e3}
    environment = {"OMP_NUM_THREADS": "1"} if options.narrow else {}
    if options.worker_shares:
        ours = "zenflow3" if options.stage == 3 else "zenflow_exact"
        alone = run_process(run, _spec(options, ours, 0.0, _ALONE_S), timeout=options.timeout)
        in_turn = options.ranks / len(options.worker_cores) if options.worker_cores else 1
        pass_s = max(1.0, in_turn) * median(alone.worker_s)
        part = PART_OF_STEP[options.share_of]
        computes_s = {share: pass_s / share / part for share in options.worker_shares}
    for repeat in range(options.repeats):
        runs.append([])
        for (share, compute_s), method in itertools.product(computes_s.items(), options.methods):
            spec = _spec(options, method, share, compute_s)
            try:
                runs[-1].append(run_process(run, spec, timeout=options.timeout, environment=environment))
                step_s = runs[-1][-1].step_s
                outcome = f"{1e3 * sum(step_s) / len(step_s):.0f} ms a step"
            except RuntimeError as error:
                failures[method] = str(error)
                outcome = f"FAILED: {error}"
            minutes = (time.perf_counter() - start) / 60
            print(f"[{repeat + 1}/{options.repeats}, {minutes:.1f} min] {method}: {outcome}", flush=True)
    of_stage = {METHODS[name].stage for name in options.methods}
    others = {name: method.not_on for name, method in METHODS.items() if method.stage in of_stage}
    unavailable = {name: reasons[options.device] for name, reasons in others.items() if options.device in reasons}
    return {"failures": failures, "unavailable": unavailable, "runs": runs}


def _spec(options: argparse.Namespace, method: str, worker_share: float, compute_s: float) -> StepSpec:
    return StepSpec(
        device=options.device,
        method=method,
        params=options.params,
        batch=options.batch,
        tokens=options.tokens,
        compute_s=compute_s,
        warm_up=options.warm_up + DECIDING * (options.device in METHODS[method].decides_on),
        steps=options.steps,
        narrow=options.narrow,
        embedding=options.embedding,
        asynchronous=options.asynchronous,
        ranks=options.ranks,
        worker_share=worker_share,
        share_of=options.share_of,
        worker_cores=options.worker_cores,
        pcie=options.pcie,
        device_memory=options.device_memory,
    )


def describe(written: Mapping[str, Any]) -> str:
    """The tables of a result file."""
    results = results_of(written)
    n_steps = max((len(r.step_s) for of_repeat in results for r in of_repeat), default=0)
    # Results of former code have no such key.
    reasons = [f"{METHODS[name].title}: {reason}" for name, reason in written.get("unavailable", {}).items()]
    notes = [f"not on this device: {', '.join(reasons)}"] if reasons else []
    specs = [r.spec for of_repeat in results for r in of_repeat if r.resident_share and r.spec.device == "simulated"]
    if specs:
        notes.append(
            f"the device updates resident states at {specs[0].device_memory:g} GB/s, {RESIDENT_BYTES} bytes a parameter"
        )
    return with_origin(tables(results), written, f"{len(results)} repeats of {n_steps} steps, interleaved", *notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a run failed."""
    return 1 if report(parse_arguments(arguments), measure, describe)["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
