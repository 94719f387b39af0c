"""Copies the columns and rows that the README shows from the measured tables of other documents: `python -m docs.quote_tables`.

With a name behind it, the result goes to that file instead of the README.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.documents import put_into_document

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A part of one measured table."""

    document: str
    table: str
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()
    """First cells of the rows; none: all rows."""


QUOTES = (
    Quote(
        document="docs/performance.md",
        table="step_time_simulated_151M_1x16",
        columns=("method", "mean ms", "p99/p50", "time / zero_offload", "waiting", "host GB"),
        rows=(
            "floor: gradients dropped, no step",
            "DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)",
            "DeepSpeed ZenFlow, S=4, overlap",
            "ours, S=4, d=1",
            "ours, S=1, d=0 (AdamW itself), no clipping",
        ),
    ),
    Quote(
        document="docs/convergence.md",
        table="fast",
        columns=("method", "val. loss", "min..max", "to AdamW"),
        rows=(
            "DeepSpeed ZeRO-2 offload, AdamW",
            "DeepSpeed ZenFlow, S=4, repaired",
            "ZenFlowStrategy, S=4",
            "ZenFlowStrategy, S and d auto",
        ),
    ),
)


def cells(line: str) -> list[str]:
    """Those of one line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def quoted(quote: Quote) -> str:
    """The part of the table that is shown, with the command that measured it, where the document has one, and when and where that was.

    Raises:
        ValueError: the document does not have the table, a column or a row.
    """
    text = (ROOT / quote.document).read_text()
    _, found, rest = text.partition(f"<!-- table {quote.table} -->\n")
    if not found:
        raise ValueError(f"{quote.document} has no table {quote.table!r}; change QUOTES in docs/quote_tables.py")
    lines = rest.partition("<!-- end -->")[0].strip().splitlines()
    table = [cells(line) for line in lines if line.startswith("|")]
    header, rows = table[0], table[2:]
    missing = {*quote.columns} - {*header} | {*quote.rows} - {row[0] for row in rows}
    if missing:
        raise ValueError(f"{quote.document}, table {quote.table}: there is no {sorted(missing)}; change QUOTES")
    places = [header.index(column) for column in quote.columns]
    chosen = [[row[place] for place in places] for row in rows if not quote.rows or row[0] in quote.rows]
    notes = [line for line in lines if line and not line.startswith("|")]
    return "\n\n".join([tabulate(chosen, quote.columns, tablefmt="github", disable_numparse=True), *notes])


def with_quotes(document: str) -> str:
    """The document with every quoted table as it is now."""
    return put_into_document(document, {quote.table: quoted(quote) for quote in QUOTES})


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else README
    target.write_text(with_quotes(README.read_text()))
