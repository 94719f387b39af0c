"""The examples' commands, run as a user runs them, and blocks of the documents."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common.processes import fresh_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GLUE_SAMPLE = EXAMPLES / "data" / "SST-2"
ALPACA_SAMPLE = EXAMPLES / "data" / "alpaca"


def run_python(
    folder: Path, *arguments: object, timeout: float, places: Iterable[Path | str] = (), **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Python in a process of its own that works in `folder`, with modules of the repository and in `places`; it must succeed."""
    path = os.pathsep.join([*map(str, places), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = fresh_environment(PYTHONPATH=path, **variables)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def run_example(folder: Path, script: str, *arguments: str, timeout: float) -> str:
    """`python examples/SCRIPT ARGUMENTS`; returns its standard output."""
    done = run_python(folder, EXAMPLES / script, *arguments, timeout=timeout)
    strange = re.findall(r".*(?:[Dd]eprecat|Warning|Failed to load).*", done.stderr)
    assert not strange, strange
    return done.stdout


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks in a language; "" for output."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [body for lang, body in found if lang == language]


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def logged(folder: Path, name: str, *, version: int = 0) -> list[float]:
    """The values of one metric that an example's run in `folder` has logged, in order."""
    (path,) = folder.glob(f"logs/csv*/version_{version}/metrics.csv")
    return [float(row[name]) for row in csv_rows(path) if row[name]]
