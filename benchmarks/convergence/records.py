"""Records of runs, and the JSON-lines file that holds them."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, order=True)
class Spec:
    """Identity of a run."""

    setting: str
    method: str
    lr: float
    seed: int
    steps: int


@dataclass(kw_only=True)
class Record:
    """Result of a run."""

    spec: Spec
    commit: str = ""
    """Last commit of the code that ran, and a hash of its uncommitted changes."""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str = ""
    seconds: float = 0.0
    """Wall time of the training; concurrent processes may have slowed it down."""
    data: str = ""
    """Hash of the training data's bytes."""
    initial_weights: str = ""
    final_weights: str = ""
    """Hash of the weights' bits after training: equal for runs that are equal bit for bit."""
    loss_every: int = 10
    """Steps of which each entry of `train_loss` is the mean."""
    train_loss: list[float] = field(default_factory=list)
    val_loss: float | None = None
    """Trained objective on held-out data."""
    steps_to_threshold: int | None = None
    """Steps until the held-out accuracy of a threshold task; None: not reached, or another task."""
    error: str | None = None
    """Reason of a failure."""


def read(path: Path) -> list[Record]:
    """All records of a file, oldest first; empty if there is no file."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        spec = Spec(**{key.name: values.pop(key.name) for key in dataclasses.fields(Spec)})
        records.append(Record(spec=spec, **values))
    return records


def append(path: Path, record: Record) -> None:
    """Adds a record as one line, in which `spec`'s fields stand beside the others."""
    values = dataclasses.asdict(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**values.pop("spec"), **values}) + "\n")


def newest(records: Iterable[Record]) -> dict[Spec, Record]:
    """The last record of each spec; a failure does not replace a success."""
    result: dict[Spec, Record] = {}
    for record in records:
        before = result.get(record.spec)
        if before is None or record.error is None or before.error is not None:
            result[record.spec] = record
    return result


def is_finished(spec: Spec, commit: str, records: Iterable[Record]) -> bool:
    """Whether the same code has run this without failure."""
    return any(r.spec == spec and r.commit == commit and r.error is None for r in records)
