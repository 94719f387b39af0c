"""Counts how the random trainings end, for docs/random_trainings.md."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tabulate import tabulate

from harness import workers
from processes import shared_bytes

ABOUT = """# Random trainings

Trainings that hypothesis draws, always the same ones: configurations in every form (keywords, files, the command line), with random values
of all keys, of DeepSpeed's and of the Trainer's and the optimizer's, valid or not; and modules of random shapes, memory layouts, types,
shared, frozen and unused parts, layers and buffers. `scripts/test -m slow tests/fuzz --outcomes=docs/random_trainings.md` runs all of them
and writes this file; `scripts/test tests/fuzz` runs a few. No training crashes, hangs, or leaves a process or shared memory.

* *equal in every step*: with nothing late, the weights of each step, and master weights and moments at the end, have the bits of the
  worker's AdamW written in torch, and gradients and buffers those of the module in plain torch.
* *exact state equal*: in other schedules, or behind backward with a predicted clip factor, master weights and moments at the end have the
  bits of AdamW on the gradients that were computed.
* *finite*: moments in 16 bits, which are rounded where windows end, in another schedule.
* *refused*: training does not start, and the error names the key. Some are errors of torch, Lightning or DeepSpeed themselves.
"""


def report(counts: dict[str, Counter[str]]) -> str:
    """The document.

    Args:
        counts: of outcomes, by kind of training.
    """
    trained, refused = {}, {}
    for kind, of_kind in counts.items():
        trained[kind] = {name: n for name, n in of_kind.items() if not name.startswith("refused: ")}
        refused[kind] = {name.removeprefix("refused: "): n for name, n in of_kind.items() if name not in trained[kind]}
    names = ("equal in every step", "exact state equal", "finite")
    rows = [[name, *(of_kind.get(name, 0) for of_kind in trained.values())] for name in names]
    rows.append(["refused by name", *(sum(of_kind.values()) for of_kind in refused.values())])
    rows.append(["all", *(of_kind.total() for of_kind in counts.values())])
    table = tabulate(rows, ["outcome", *counts], tablefmt="github")
    lists = [
        f"## Refused {kind}, by key\n\n"
        + "\n".join(f"* {name}: {n}" for name, n in sorted(of_kind.items(), key=lambda item: (-item[1], item[0])))
        for kind, of_kind in refused.items()
    ]
    return "\n".join([ABOUT, table, "", "\n\n".join(lists), ""])


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """Counts one outcome of one kind of training."""
    counts: dict[str, Counter[str]] = {}
    yield lambda kind, outcome: counts.setdefault(kind, Counter()).update([outcome])
    path = request.config.getoption("--outcomes")
    if path is not None:
        Path(path).write_text(report(counts))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test after which a worker process or shared memory of this process remains."""
    gc.collect()
    before = shared_bytes()
    yield
    gc.collect()
    assert workers() == []
    assert shared_bytes() <= before
