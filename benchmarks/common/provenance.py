"""Provenance of a result: commit, versions, machine, command and date."""

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

PACK = ROOT / ".gpu"
"""What `benchmarks.gpu.pack` collects for a machine without git and network."""
PACKED = PACK / "packed.json"

# A change of these makes a convergence run another one; a change of reports, documents and results does not.
_CODE = (
    "lightning_zenflow",
    "csrc",
    "benchmarks/common/gpt.py",
    "benchmarks/common/trainer.py",
    "benchmarks/peers",
    *(
        f"benchmarks/convergence/{name}.py"
        for name in ("corpus", "gpt", "methods", "optimizers", "run", "threshold_tasks")
    ),
)


STEP_CODE = (*_CODE, "examples/data", "benchmarks/step_time", "benchmarks/gpu")
"""The same for runs on a GPU."""

GLUE_CODE = (*_CODE, "benchmarks/glue", "conf/glue_minilm.yaml", "examples/common", "examples/glue_task")
"""The same for fine-tuning on GLUE."""

PACKED_CODE = tuple(dict.fromkeys((*STEP_CODE, *GLUE_CODE)))
"""What a checkout outside git has of the commit that was packed."""


def commit_of_code(code: Sequence[str] = _CODE) -> str:
    """The last commit that changed files or folders of the repository, "+" and a hash of uncommitted changes.

    Outside git it is the one that was packed, "+" and a hash of `PACKED_CODE` if that has changed since; "unknown" if none was.
    """
    try:
        commit = _git("log", "-1", "--format=%h", "--abbrev=12", "--", *code)
        changes = _git("diff", "HEAD", "--", *code) + _git("ls-files", "--others", "--exclude-standard", "--", *code)
        return commit + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return _packed_commit()


def _packed_commit() -> str:
    if not PACKED.exists():
        return "unknown"
    packed, code = json.loads(PACKED.read_text()), digest_of_code(PACKED_CODE)
    return str(packed["commit"]) + ("" if packed["code"] == code else f"+{code[:8]}")


def digest_of_code(code: Sequence[str]) -> str:
    """SHA-256 of files or folders of the repository."""
    digest = hashlib.sha256()
    roots = [ROOT / path for path in code]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    for file in files:
        if file.is_file() and file.parent.name != "__pycache__":
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


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


def origin(device: str = "cpu", code: Sequence[str] = _CODE) -> dict[str, Any]:
    """Commit of the code, versions and hardware."""
    versions = {name: version(name) for name in ("torch", "lightning", "deepspeed")}
    return {
        "commit": commit_of_code(code),
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
