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

Trainings that hypothesis draws, always the same ones: configurations in every form (keywords, files, the command line), with random values of
all keys, of DeepSpeed's and of the Trainer's and the optimizer's, valid or not; and modules of random shapes, memory layouts, types, shared,
frozen and unused parts, layers and buffers. `scripts/test -m slow tests/fuzz --outcomes=docs/random_trainings.md` runs all of them and
writes this file; `scripts/test tests/fuzz` runs a few. No training crashed, hung, or left a process or shared memory.

* *equal in every step*: with nothing late, the weights of each step, and master weights and moments at the end, have the bits of the worker's
  AdamW written in torch, and the gradients and buffers those of the module in plain torch.
* *exact state equal*: in other schedules, or behind backward with a predicted clip factor, master weights and moments at the end have the bits
  of AdamW on the gradients that were computed.
* *finite*: moments in 16 bits, which are rounded where windows end, in another schedule.
* *refused: key*: training does not start, and the error names the key. Some are errors of torch, Lightning or DeepSpeed themselves.
"""


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """Counts one outcome of one kind of training."""
    counts: dict[str, Counter[str]] = {}
    yield lambda kind, outcome: counts.setdefault(kind, Counter()).update([outcome])
    path = request.config.getoption("--outcomes")
    if path is not None:
        kinds = sorted(counts)
        total = sum(counts.values(), Counter())
        names = sorted(total, key=lambda name: (name.startswith("refused"), -total[name], name))
        rows = [[name, *(counts[kind][name] for kind in kinds)] for name in names]
        rows.append(["all", *(counts[kind].total() for kind in kinds)])
        table = tabulate(rows, ["outcome", *kinds], tablefmt="github")
        Path(path).write_text(f"{ABOUT}\n{table}\n")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test after which a worker process or shared memory of this process remains."""
    gc.collect()
    before = shared_bytes()
    yield
    gc.collect()
    assert workers() == []
    assert shared_bytes() <= before
