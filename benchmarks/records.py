"""What is known of a run, and the JSON-lines file that keeps it."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# A change of these makes a run another one; of reports, documents and results not.
_CODE = (
    "lightning_zenflow",
    "csrc",
    *(
        f"benchmarks/{name}.py"
        for name in ("corpus", "deepspeed_peers", "glue_sample", "gpt", "initial_weights", "methods", "run_one")
    ),
    "examples/glue_task",
    "examples/data",
    "conf/glue.yaml",
)


@dataclass(frozen=True, kw_only=True, order=True)
class Spec:
    """What is to be run."""

    setting: str
    method: str
    lr: float
    seed: int
    steps: int


@dataclass(kw_only=True)
class Record:
    """A run that has ended."""

    spec: Spec
    commit: str = ""
    """Last commit of the code that ran, and a hash of its changes since then if there were any."""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str = ""
    seconds: float = 0.0
    """Wall time of the training alone, which other processes may have slowed down."""
    data: str = ""
    """Hash of the training data's bytes."""
    initial_weights: str = ""
    final_weights: str = ""
    """Hash of the weights' bits after training: equal for runs that are equal bit for bit."""
    loss_every: int = 10
    """Steps of which each entry of `train_loss` is the mean."""
    train_loss: list[float] = field(default_factory=list)
    val_loss: float | None = None
    """Of the trained objective, on data that is not trained on."""
    dev_loss_of_labels: float | None = None
    """GLUE sample: the labels' loss on the development set, whose combinations of words are all new."""
    dev_accuracy: float | None = None
    error: str | None = None
    """Why the run failed."""


def to_json(record: Record) -> str:
    """One line; `spec`'s fields stand beside the others."""
    values = dataclasses.asdict(record)
    return json.dumps({**values.pop("spec"), **values})


def from_json(line: str) -> Record:
    """The inverse of `to_json`."""
    values = json.loads(line)
    spec = Spec(**{key.name: values.pop(key.name) for key in dataclasses.fields(Spec)})
    return Record(spec=spec, **values)


def read(path: Path) -> list[Record]:
    """All records of a file, oldest first; none where there is no file."""
    return [from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, record: Record) -> None:
    """Adds a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(to_json(record) + "\n")


def newest(records: Iterable[Record]) -> dict[Spec, Record]:
    """The last record of each spec; one that succeeded is not replaced by a failure."""
    result: dict[Spec, Record] = {}
    for record in records:
        before = result.get(record.spec)
        if before is None or record.error is None or before.error is not None:
            result[record.spec] = record
    return result


def commit_of_code() -> str:
    """The last commit that changed the code that runs here, and "+" and a hash of what is not committed; "unknown" outside git."""
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
    """Makes sure that the package that runs is the one whose commit is recorded.

    Raises:
        RuntimeError: another one is imported; an editable install of another checkout comes before PYTHONPATH.
    """
    spec = importlib.util.find_spec("lightning_zenflow")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != ROOT / "lightning_zenflow":
        raise RuntimeError(
            f"lightning_zenflow is imported from {spec and spec.origin}, not from this repository ({ROOT}), so results would carry a wrong"
            " commit; install this checkout: pip install --editable '.[benchmarks]'"
        )


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    names = ("torch", "lightning", "deepspeed")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def hardware() -> str:
    """The machine in a few words."""
    return f"{os.cpu_count()} cores {platform.machine()}"


def about(module: str, arguments: Sequence[str] | None, *, hardware: str) -> dict[str, Any]:
    """What a result file says of how it came about.

    Args:
        module: the benchmark's.
        arguments: its command line's; None: those of this process.
        hardware: the machine in a few words.
    """
    return {
        "command": " ".join([f"python -m {module}", *(sys.argv[1:] if arguments is None else arguments)]),
        "date": date.today().isoformat(),
        "commit": commit_of_code(),
        "versions": versions(),
        "hardware": hardware,
    }


def with_origin(table: str, about: Mapping[str, Any]) -> str:
    """A table and, below it, what `about` says; to be continued in the same line."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{table}\n\n`{about['command']}`\n\nCommit {about['commit']}, {about['date']}; {about['hardware']}; {versions}"
    )
