"""Instructions in Alpaca's format: objects with `instruction`, `output` and, where there is more to work on, `input`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import hub


@dataclass(frozen=True, kw_only=True)
class Record:
    """An instruction, what it is to be applied to (often empty) and the wanted answer."""

    instruction: str
    input: str
    output: str


def read_records(path: str) -> list[Record]:
    """Read a JSON file with a list of objects, as Alpaca's `alpaca_data.json`, or a .jsonl file with one object a line.

    Raises FileNotFoundError, and ValueError for a file that is something else or empty.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"{path} does not exist (working directory: {Path.cwd()})")
    text = file.read_text(encoding="utf-8")
    # Not splitlines: JSON allows Unicode line separators inside strings.
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        rows = [json.loads(line) for line in lines] if file.suffix == ".jsonl" else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of objects, got a {type(rows).__name__}")
    return records_from_rows(rows, path)


def load_records(dataset: str) -> list[Record]:
    """Download (or take from the cache) the split "train" of a Hugging Face dataset, the only one that Alpaca has."""
    rows = hub.load_split(dataset, None, "train", instead="set data.train_file to a JSON file in Alpaca's format")
    return records_from_rows(rows, f"data.dataset={dataset!r}")


def records_from_rows(rows: Iterable[Mapping[str, Any]], origin: str) -> list[Record]:
    """Rows as records; ValueError, beginning with `origin`, for a row that is none and where there are no rows."""
    records = [_parse(row, f"{origin}, row {number}") for number, row in enumerate(rows)]
    if not records:
        raise ValueError(f"{origin} has no instructions")
    return records


def _parse(row: object, where: str) -> Record:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: {row!r} is no object")
    fields = {"instruction": row.get("instruction"), "input": row.get("input") or "", "output": row.get("output")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} must be text, got {value!r}")
    return Record(**fields)
