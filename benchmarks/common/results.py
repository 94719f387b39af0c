"""Result files, and the tables made of them in documents."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.common.provenance import ROOT, about

RESULTS = ROOT / "benchmarks" / "results"

FORMER_NAMES = {
    "drawing_s": "figure_s",
    "no_look_ahead": "no_weight_prediction",
    "pace": "schedule",
    "zenflow_no_stand_in": "zenflow_no_provisional",
}
"""Names in older result files and commands -> names of today."""

_END = "<!-- end -->"


def from_json(text: str) -> Any:
    """Parses a result, of which former names are replaced."""
    for former, name in FORMER_NAMES.items():
        text = text.replace(f'"{former}"', f'"{name}"')
    return json.loads(text)


def markdown(rows: Iterable[Mapping[str, str]]) -> str:
    """A Markdown table with a column for each key."""
    return str(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval=""))


def put_into_document(document: str, tables: Mapping[str, str]) -> str:
    """The document with each table between its markers, `<!-- table NAME -->` and `<!-- end -->`."""
    for name, text in tables.items():
        marker = f"<!-- table {name} -->\n"
        before, found, rest = document.partition(marker)
        if found:
            _, end, after = rest.partition(_END)
            document = f"{before}{marker}\n{text}\n\n{end}{after}"
    return document


def update_document(document: str, tables: Mapping[str, str], results: Path) -> None:
    """Puts tables into docs/DOCUMENT, if they are made of the repository's own results."""
    path = ROOT / "docs" / document
    if results.resolve() == RESULTS and path.exists():
        path.write_text(put_into_document(path.read_text(), tables))


def publish(name: str, text: str, document: str, results: Path) -> None:
    """Prints a table; writes it to RESULTS/NAME.md and into the document."""
    (results / f"{name}.md").write_text(text + "\n")
    update_document(document, {name: text}, results)
    print(text)


def report(
    options: argparse.Namespace,
    name: str,
    document: str,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    describe: Callable[[Mapping[str, Any]], str],
) -> dict[str, Any]:
    """Measures, writes RESULTS/NAME.json and publishes its table; with `--report-only` the table of the existing file.

    Args:
        options: the benchmark's command line.
        name: of the result files.
        document: file in docs/ that shows the table.
        measure: returns the content of the result file, without the provenance; dataclasses are allowed.
        describe: makes the table from what the file holds.

    Returns:
        The content of the result file.
    """
    path = options.results / f"{name}.json"
    if not options.report_only:
        values = {**about(options.command, getattr(options, "device", "cpu")), **measure(options)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, default=dataclasses.asdict))
    written = from_json(path.read_text())
    publish(name, describe(written), document, options.results)
    return dict(written)
