"""Makes tables of the records of measurements, and copies columns and rows of them into documents: `python -m docs.quote_tables`."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.provenance import ROOT
from benchmarks.common.results import RESULTS, markdown
from benchmarks.convergence.records import read
from benchmarks.convergence.report import tables_of
from benchmarks.glue.__main__ import stored
from benchmarks.glue.report import group_by_task, summary, table
from benchmarks.step_time.report import tables
from benchmarks.step_time.run import results_of

README, CONVERGENCE = ROOT / "README.md", ROOT / "docs" / "convergence.md"


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A part of one measured table."""

    document: Path
    table: str
    """Between `<!-- table TABLE -->` and `<!-- end -->` in the document; of `benchmarks.convergence` the table's name, of
    `benchmarks.glue` the task, or GLUE for all."""
    record: str
    """File in benchmarks/results/, or "glue" for the folders of that name."""
    columns: tuple[str, ...] = ()
    """Empty: all columns."""
    rows: tuple[str, ...] = ()
    """First cells of the rows; empty: all rows."""


QUOTES = (
    Quote(document=CONVERGENCE, table="delay", record="convergence.jsonl"),
    *(
        Quote(
            document=CONVERGENCE,
            table=task,
            record="glue",
            columns=("method", "mean at each lr (runs)", "min..max", "beside AdamW", "clipped", "steps by schedule"),
        )
        for task in ("SST-2", "CoLA", "RTE")
    ),
    Quote(document=README, table="GLUE", record="glue"),
)
GLUE = ("glue", "gpu_h200/glue")


def table_of(quote: Quote) -> str:
    """The whole Markdown table of a record."""
    path = RESULTS / quote.record
    if quote.record == "glue":
        by_task = group_by_task([run for folder in GLUE for run in stored(RESULTS / folder)])
        return summary(by_task) if quote.table == "GLUE" else table(by_task[quote.table])
    if path.suffix == ".jsonl":
        return tables_of(read(path))[quote.table]
    return tables(results_of(json.loads(path.read_text())))


def rows_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table, each as header -> cell; other lines are ignored."""
    cells = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line] for line in cells]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def quoted(quote: Quote) -> str:
    """The quoted part of the table, without its notes.

    Raises:
        ValueError: the table does not have a column or a row.
    """
    rows = {next(iter(row.values())): row for row in rows_of(table_of(quote))}
    columns = quote.columns or tuple(next(iter(rows.values())))
    missing = {*columns} - {*next(iter(rows.values()))} | {*quote.rows} - {*rows}
    if missing:
        raise ValueError(f"{quote.record}: there is no {sorted(missing)}; change QUOTES")
    return markdown([{column: rows[name][column] for column in columns} for name in quote.rows or rows])


def with_quotes(path: Path) -> str:
    """A document with every quoted table up to date, between its markers."""
    document = path.read_text()
    for quote in (quote for quote in QUOTES if quote.document == path):
        before, begin, rest = document.partition(f"<!-- table {quote.table} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        document = f"{before}{begin}{quoted(quote)}\n{end}{after}"
    return document


if __name__ == "__main__":
    for path in (README, CONVERGENCE):
        path.write_text(with_quotes(path))
