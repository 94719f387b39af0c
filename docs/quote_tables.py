"""Copies columns and rows of measured tables into the README: `python -m docs.quote_tables`.

`python -m docs.quote_tables FILE` writes the result to a file instead.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.provenance import ROOT
from benchmarks.common.results import RESULTS, markdown

README = ROOT / "README.md"


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A part of one measured table."""

    table: str
    """Between `<!-- table TABLE -->` and `<!-- end -->` in the README."""
    result: str
    """File in benchmarks/results/."""
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()
    """First cells of the rows; empty: all rows."""


QUOTES = (
    Quote(
        table="step_time_simulated_151M_asynchronous_1x16",
        result="step_time_simulated_151M_asynchronous_1x16.md",
        columns=("method", "mean ms", "p99/p50", "time / zero_offload", "waiting", "host GB"),
        rows=(
            "floor: gradients dropped, no step",
            "DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)",
            "DeepSpeed ZenFlow, S=4, overlap",
            "ZenFlowStrategy, S=4, d=1",
            "ZenFlowStrategy, S=1, d=0",
        ),
    ),
)


def rows_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table, each as header -> cell; other lines are ignored."""
    cells = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line] for line in cells]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def quoted(quote: Quote) -> str:
    """The quoted part of the table, without its notes: the document links to the file, which has command and provenance.

    Raises:
        ValueError: the table does not have a column or a row.
    """
    table = (RESULTS / quote.result).read_text()
    rows = {next(iter(row.values())): row for row in rows_of(table)}
    missing = {*quote.columns} - {*next(iter(rows.values()))} | {*quote.rows} - {*rows}
    if missing:
        raise ValueError(f"benchmarks/results/{quote.result}: there is no {sorted(missing)}; change QUOTES")
    chosen = [{column: rows[name][column] for column in quote.columns} for name in quote.rows or rows]
    return markdown(chosen)


def with_quotes(document: str) -> str:
    """The document with every quoted table up to date, between its markers."""
    for quote in QUOTES:
        before, begin, rest = document.partition(f"<!-- table {quote.table} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        document = f"{before}{begin}{quoted(quote)}\n{end}{after}"
    return document


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else README
    target.write_text(with_quotes(README.read_text()))
