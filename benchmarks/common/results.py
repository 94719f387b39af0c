"""Result files, and the tables made of them."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tabulate import tabulate

from benchmarks.common.provenance import ROOT, about

RESULTS = ROOT / "benchmarks" / "results"


def markdown(rows: Iterable[Mapping[str, str]]) -> str:
    """A Markdown table with a column for each key."""
    return str(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval=""))


def report(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    describe: Callable[[Mapping[str, Any]], str],
) -> dict[str, Any]:
    """Measures, writes RESULTS/NAME.json, and prints the table; with `--report-only` the table of the existing file.

    Args:
        options: the benchmark's command line.
        measure: returns the content of the result file, without the provenance; dataclasses are allowed.
        describe: makes the table from what the file holds.

    Returns:
        The content of the result file.
    """
    path = options.results / f"{options.name}.json"
    if not options.report_only:
        values = {**about(options.command, getattr(options, "device", "cpu")), **measure(options)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, default=dataclasses.asdict))
    written = json.loads(path.read_text())
    print(describe(written))
    return dict(written)
