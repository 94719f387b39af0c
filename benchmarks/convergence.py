"""Does training with `ZenFlowStrategy` converge like AdamW? Real training of small models by every method, and a table of the results.

    python -m benchmarks.convergence                                     # everything: hours on two cores
    python -m benchmarks.convergence --settings fast --methods adamw,zenflow_s4 --seeds 1
    python -m benchmarks.convergence --report-only
    python -m benchmarks.convergence --check-repeat

Each run is a process with its own cores and one thread; its record is appended to RESULTS/convergence.jsonl at once. A run that the same
code has finished is skipped, so an interrupted comparison goes on where it stopped. docs/convergence.md says what is compared.
"""

import argparse
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks import records
from benchmarks.documents import RESULTS, update_document
from benchmarks.methods import METHODS
from benchmarks.processes import run_process
from benchmarks.records import ROOT, Record, Spec
from benchmarks.report import is_finished, write_reports
from benchmarks.settings import SETTINGS

DOCUMENT = ROOT / "docs" / "convergence.md"
CACHE = Path.home() / ".cache" / "lightning_zenflow"


def names_of(allowed: Sequence[str], kind: str) -> Callable[[str], list[str]]:
    """Parser of a comma-separated list of names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is no {kind}; allowed are {', '.join(allowed)}")
        return names

    return parse


def numbers_of(kind: type[float]) -> Callable[[str], list[float]]:
    """Parser of a comma-separated list of numbers."""

    def parse(text: str) -> list[float]:
        try:
            return [kind(number) for number in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--settings", type=names_of(list(SETTINGS), "setting"), default=list(SETTINGS), metavar="NAME,...")
    add(
        "--methods",
        type=names_of(list(METHODS), "method"),
        metavar="NAME,...",
        help="default: all; the main ones in settings whose runs take minutes",
    )
    add("--lrs", type=numbers_of(float), metavar="LR,...", help="peak learning rates; default: the setting's")
    add("--seeds", type=numbers_of(int), default=[1, 2, 3], metavar="SEED,...")
    add("--steps", type=int, help="optimizer steps; default: the setting's; others are left out of the tables")
    add("--jobs", type=int, default=2, help="runs at a time; the cores are divided among them")
    add("--timeout", type=float, default=3600, help="longest time of a run in seconds")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER")
    add("--cache", type=Path, default=CACHE, metavar="FOLDER", help="where the pre-trained model is kept")
    add("--again", action="store_true", help="run what is finished as well")
    add("--report-only", action="store_true", help="tables and plots of the results that are there")
    add("--check-repeat", action="store_true", help="run zenflow_s4 twice and compare the final weights bit for bit")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: allowed is a number >= 1")
    return options


def grid(options: argparse.Namespace) -> list[Spec]:
    """All runs that are asked for; the first seed of everything in a setting comes before any second one."""
    specs = []
    for name in options.settings:
        setting = SETTINGS[name]
        methods = options.methods or [key for key, method in METHODS.items() if method.main or setting.all_methods]
        specs += [
            Spec(setting=name, method=method, lr=lr, seed=seed, steps=options.steps or setting.steps)
            for seed in options.seeds
            for lr in options.lrs or setting.lrs
            for method in methods
        ]
    return specs


def run(spec: Spec, cores: list[int], cache: Path, timeout: float) -> Record:
    """Runs one spec in a process on its own cores; a process that dies without a record makes a record of failure."""
    ended = run_process(
        "benchmarks.run_one",
        [json.dumps(vars(spec)), str(cache)],
        cores=cores,
        environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=timeout,
    )
    if ended.result is not None:
        return records.from_json(ended.result)
    return Record(
        spec=spec,
        commit=records.commit_of_code(),
        versions=records.versions(),
        hardware=records.hardware(),
        error=ended.error,
    )


def run_all(specs: Sequence[Spec], options: argparse.Namespace) -> Iterator[Record]:
    """Runs specs, `options.jobs` at a time, and gives each record when it is there."""
    allowed = sorted(os.sched_getaffinity(0))
    slots: queue.Queue[list[int]] = queue.Queue()
    for job in range(options.jobs):
        slots.put([core for i, core in enumerate(allowed) if i % options.jobs == job] or allowed)

    def run_in_slot(spec: Spec) -> Record:
        cores = slots.get()
        try:
            return run(spec, cores, options.cache, options.timeout)
        finally:
            slots.put(cores)

    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(run_in_slot, spec) for spec in specs]
        try:
            for future in as_completed(pending):
                yield future.result()
        finally:
            for future in pending:
                future.cancel()


def check_repeat(options: argparse.Namespace) -> int:
    """Runs zenflow_s4 twice; the exit status is 0 if the final weights are the same bits."""
    setting = options.settings[0]
    lr = (options.lrs or SETTINGS[setting].lrs)[0]
    steps = options.steps or SETTINGS[setting].steps
    spec = Spec(setting=setting, method="zenflow_s4", lr=lr, seed=options.seeds[0], steps=steps)
    hashes = []
    for record in run_all([spec, spec], options):
        if record.error is not None:
            print(record.error)
            return 1
        hashes.append(record.final_weights)
    equal = hashes[0] == hashes[1]
    print(f"{spec}: final weights {hashes[0]} and {hashes[1]}: {'the same bits' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


def make_reports(results: Path) -> None:
    """Tables and plots; those of the repository's results also go into the document."""
    tables = write_reports(records.read(results / "convergence.jsonl"), results)
    for setting, text in tables.items():
        print(f"\n{setting}: {SETTINGS[setting].title}\n\n{text}")
    update_document(DOCUMENT, tables, results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments)
    path = options.results / "convergence.jsonl"
    if not options.report_only:
        records.check_origin()
    if options.check_repeat:
        return check_repeat(options)
    if not options.report_only:
        commit = records.commit_of_code()
        done = records.read(path)
        specs = [spec for spec in grid(options) if options.again or not is_finished(spec, commit, done)]
        start = time.perf_counter()
        for number, record in enumerate(run_all(specs, options), start=1):
            records.append(path, record)
            spec, minutes = record.spec, (time.perf_counter() - start) / 60
            result = f"val. loss {record.val_loss:.4f}" if record.error is None else f"FAILED: {record.error[-300:]}"
            print(
                f"[{number}/{len(specs)}, {minutes:.1f} min] {spec.setting} {spec.method} lr={spec.lr:g} seed={spec.seed}: {result}"
                f" ({record.seconds:.0f} s)",
                flush=True,
            )
    make_reports(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
