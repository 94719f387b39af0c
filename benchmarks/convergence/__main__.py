"""Does training with `ZenFlowStrategy` converge like AdamW? Trains small models with every method and tabulates the results.

    python -m benchmarks.convergence                                     # everything: hours on two cores
    python -m benchmarks.convergence --settings fast --methods adamw,zenflow_s4 --seeds 1
    python -m benchmarks.convergence --report-only

The first seed is run at every learning rate, the others at each method's best one; `--all-seeds-at-all-lrs` runs everything. Each run is a
process with its own cores and one thread. Its record is appended to RESULTS/convergence.jsonl at once. Runs that the same code has finished
are skipped, so an interrupted comparison continues. docs/convergence.md describes the comparison.
"""

import argparse
import os
import queue
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.common import provenance
from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.processes import run_process
from benchmarks.convergence import records
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.records import Record, Spec, newest
from benchmarks.convergence.report import tables_of
from benchmarks.convergence.run import run
from benchmarks.convergence.settings import SETTINGS
from benchmarks.convergence.summary import summarise

CACHE = Path.home() / ".cache" / "lightning_zenflow"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.convergence", __doc__)
    add = parser.add_argument
    add("--settings", type=list_of(one_of(SETTINGS, "setting")), default=list(SETTINGS), metavar="NAME,...")
    add("--methods", type=list_of(one_of(METHODS, "method")), metavar="NAME,...", help="default: the setting's")
    add("--lrs", type=list_of(float), metavar="LR,...", help="peak learning rates; default: the setting's")
    add("--seeds", type=list_of(int), default=[1, 2, 3], metavar="SEED,...", help="the first chooses the learning rate")
    add("--all-seeds-at-all-lrs", action="store_true", help="run every seed at every learning rate")
    add("--steps", type=int, help="optimizer steps; default: the setting's; others are left out of the tables")
    add("--jobs", type=int, default=2, help="concurrent runs; the cores are divided among them")
    add("--timeout", type=float, default=3600, help="limit of a run in seconds")
    add("--cache", type=Path, default=CACHE, metavar="FOLDER", help="for the pre-trained model")
    add("--again", action="store_true", help="repeat finished runs")
    parser.add_results("convergence")
    options = parser.parse(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


def grid(options: argparse.Namespace, seeds: Sequence[int]) -> list[Spec]:
    """All requested runs with these seeds."""
    specs = []
    for name in options.settings:
        setting = SETTINGS[name]
        methods = options.methods or setting.methods
        specs += [
            Spec(setting=name, method=method, lr=lr, seed=seed, steps=options.steps or setting.steps)
            for seed in seeds
            for lr in options.lrs or setting.lrs
            for method in methods
        ]
    return specs


def at_best_lr(specs: Iterable[Spec], first: Iterable[Spec], done: Sequence[Record]) -> list[Spec]:
    """Those of `specs` at the learning rate that is the best one of its setting and method among the finished runs of `first`."""
    wanted = set(first)
    by_setting: dict[str, list[Record]] = defaultdict(list)
    for spec, record in newest(done).items():
        if spec in wanted:
            by_setting[spec.setting].append(record)
    best = {
        (name, summary.method): summary.best_lr
        for name, runs in by_setting.items()
        for summary in summarise(runs, SETTINGS[name])
    }
    return [spec for spec in specs if spec.lr == best.get((spec.setting, spec.method))]


def run_all(specs: Sequence[Spec], options: argparse.Namespace) -> Iterator[Record]:
    """Runs specs, `options.jobs` at a time, and yields records in the order of completion."""
    allowed = sorted(os.sched_getaffinity(0))
    free: queue.Queue[list[int]] = queue.Queue()
    for job in range(options.jobs):
        free.put([core for i, core in enumerate(allowed) if i % options.jobs == job] or allowed)

    def run_on_free_cores(spec: Spec) -> Record:
        cores = free.get()
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            return run_process(run, spec, options.cache, cores=cores, timeout=options.timeout, environment=environment)
        except RuntimeError as error:
            return Record(spec=spec, **provenance.origin(), error=str(error))
        finally:
            free.put(cores)

    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(run_on_free_cores, spec) for spec in specs]
        try:
            for future in as_completed(pending):
                yield future.result()
        finally:
            for future in pending:
                future.cancel()


def run_missing(specs: Sequence[Spec], options: argparse.Namespace, path: Path) -> None:
    """Runs what the same code has not finished yet, and appends each record to the file."""
    commit, done = provenance.commit_of_code(), records.read(path)
    missing = [spec for spec in specs if options.again or not records.is_finished(spec, commit, done)]
    start = time.perf_counter()
    for number, record in enumerate(run_all(missing, options), start=1):
        records.append(path, record)
        spec, minutes = record.spec, (time.perf_counter() - start) / 60
        steps = "" if record.steps_to_threshold is None else f", {record.steps_to_threshold} steps"
        result = f"val. loss {record.val_loss:.4f}{steps}" if record.error is None else f"FAILED: {record.error[-300:]}"
        print(
            f"[{number}/{len(missing)}, {minutes:.1f} min] {spec.setting} {spec.method} lr={spec.lr:g} seed={spec.seed}: {result}"
            f" ({record.seconds:.0f} s)",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments)
    path = options.results / f"{options.name}.jsonl"
    if not options.report_only:
        provenance.check_origin()
        first, rest = grid(options, options.seeds[:1]), grid(options, options.seeds[1:])
        if options.all_seeds_at_all_lrs:
            run_missing([*first, *rest], options, path)
        else:
            run_missing(first, options, path)
            run_missing(at_best_lr(rest, first, records.read(path)), options, path)
    for name, text in tables_of(records.read(path)).items():
        title = SETTINGS[name].title if name in SETTINGS else "all settings, to the first method"
        print(f"\n{name}: {title}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
