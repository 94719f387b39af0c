"""Provenance of a result: commit, versions, machine, command and date."""

import hashlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

# A change of these makes a convergence run another one; a change of reports, documents and results does not.
_CODE = (
    "lightning_zenflow",
    "csrc",
    "benchmarks/common/gpt.py",
    "benchmarks/common/trainer.py",
    "benchmarks/peers",
    *(f"benchmarks/convergence/{name}.py" for name in ("corpus", "glue", "gpt", "initial_weights", "methods", "run")),
    "examples/glue_task",
    "examples/data",
    "conf/glue.yaml",
)


def commit_of_code() -> str:
    """The last commit that changed the benchmarked code, "+" and a hash of uncommitted changes; "unknown" outside git."""
    try:
        commit = _git("log", "-1", "--format=%h", "--abbrev=12", "--", *_CODE)
        changes = _git("diff", "HEAD", "--", *_CODE) + _git("ls-files", "--others", "--exclude-standard", "--", *_CODE)
        return commit + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def check_origin() -> None:
    """Checks that the imported package is the one whose commit is recorded.

    Raises:
        RuntimeError: another one is imported; an editable install of another checkout precedes PYTHONPATH.
    """
    spec = importlib.util.find_spec("lightning_zenflow")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != ROOT / "lightning_zenflow":
        raise RuntimeError(
            f"lightning_zenflow must be imported from this repository ({ROOT}), got {spec and spec.origin}: results would carry a wrong"
            " commit; install this checkout: pip install --editable '.[benchmarks]'"
        )


def hardware(device: str = "cpu") -> str:
    """The machine in a few words; on "cuda" with its GPU."""
    cpu = f"{os.cpu_count()} cores {platform.machine()}"
    return f"{torch.cuda.get_device_name()}, {cpu}" if device == "cuda" else cpu


def origin(device: str = "cpu") -> dict[str, Any]:
    """Commit, versions and hardware."""
    versions = {name: version(name) for name in ("torch", "lightning", "deepspeed")}
    return {
        "commit": commit_of_code(),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware(device),
    }


def about(command: str, device: str = "cpu") -> dict[str, Any]:
    """Fields of a result file that say how it was measured."""
    return {"command": command, "date": date.today().isoformat(), **origin(device)}


def with_origin(table: str, about: Mapping[str, Any], *notes: str) -> str:
    """A table with its provenance below, followed by `notes`."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [f"Commit {about['commit']}, {about['date']}", about["hardware"], versions, *notes]
    return f"{table}\n\n`{about['command']}`\n\n{'; '.join(parts)}."
