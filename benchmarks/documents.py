"""Measured tables in documents, so that none is typed."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.records import ROOT

_END = "<!-- end -->"
RESULTS = ROOT / "benchmarks" / "results"


def put_into_document(document: str, tables: Mapping[str, str]) -> str:
    """The document with each table between its markers, `<!-- table NAME -->` and `<!-- end -->`."""
    for name, text in tables.items():
        marker = f"<!-- table {name} -->\n"
        before, found, rest = document.partition(marker)
        if found:
            _, end, after = rest.partition(_END)
            document = f"{before}{marker}\n{text}\n\n{end}{after}"
    return document


def update_document(path: Path, tables: Mapping[str, str], results: Path) -> None:
    """Puts tables into a document of the repository, if they are of the repository's own results."""
    if results.resolve() == RESULTS and path.exists():
        path.write_text(put_into_document(path.read_text(), tables))
