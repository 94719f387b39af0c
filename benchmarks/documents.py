"""Measured tables in documents, so that none is typed."""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.records import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def put_into_document(document: str, tables: Mapping[str, str]) -> str:
    """The document with each table between its markers, `<!-- table NAME -->` and `<!-- end -->`."""
    for name, text in tables.items():
        pattern = re.compile(rf"(?<=<!-- table {re.escape(name)} -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)
        # A table may hold what would be an escape in a replacement, so no template.
        parts = pattern.split(document)
        document = f"\n{text}\n\n".join(parts)
    return document


def update_document(path: Path, tables: Mapping[str, str], results: Path) -> None:
    """Puts tables into a document of the repository, if they are of the repository's own results."""
    if results.resolve() == RESULTS and path.exists():
        path.write_text(put_into_document(path.read_text(), tables))
