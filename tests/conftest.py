"""Set-up of all tests."""

import atexit
import functools
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import end_workers

# The models are tiny and the worker's cores are the trainer's: threads that wait for each other actively only slow one another down.
# Set before torch is imported; where it is not set, Lightning chooses more.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Read when Triton is imported, which Lightning does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


DOCS = {"test_ray.py", "test_readme.py"}
"""Of tests/examples."""


def _subject(path: Path) -> str | None:
    """The marker of a test file that is no part of the package's promises, or that is pure."""
    folder = path.relative_to(Path(__file__).parent).parts[0]
    if folder == "examples":
        return "docs" if path.name in DOCS else "examples"
    if folder == "huggingface":
        return "examples"
    return folder if folder in ("benchmarks", "unit") else None


@functools.cache
def _starts_ranks(path: Path) -> bool:
    return re.search(r"run_(on_ranks|each)\(", path.read_text()) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by subject. Those that start ranks, which take longest together, come first and unit tests last."""
    places = {}
    for item in items:
        subject = _subject(item.path)
        if subject is not None and not {"gpu", "slow"} & {*item.keywords}:
            item.add_marker(subject)
        places[item] = 2 if subject == "unit" else 0 if _starts_ranks(item.path) else 1
    items.sort(key=places.__getitem__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist=loadfile` a file stays in one process, which keeps what its tests share; here the files of a folder that start ranks
    stay together, which keeps one server for them. Those of all folders would take longer than the other process has work for.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(
            self, nodeid: str
        ) -> str:  # private: what a scheduler of one's own overrides, by the manual of xdist
            file = nodeid.partition("::")[0]
            return str(Path(file).parent) if _starts_ranks(config.rootpath / file) else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_not_garbage() -> None:
    """Leaves what is there before a file's tests out of garbage collections: each set-up of a training collects, which with all that test
    modules and earlier tests have imported takes longer than a short training.
    """
    gc.collect()
    gc.freeze()


atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes with one thread, whatever the test before has left: with more, tests of small models take a hundred times as long
    beside other processes."""
    torch.set_num_threads(1)


_LINEAR = torch.nn.functional.linear


@pytest.fixture(autouse=True)
def torchs_own_linear() -> None:
    """Undoes what plain DeepSpeed's stage 3 leaves in the process: another `linear`, which adds in another order."""
    torch.nn.functional.linear = _LINEAR


@pytest.fixture(autouse=True)
def no_worker_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which a worker process of this process remains, and ends it; a pure one starts none. What a test of `OffloadAdamW`
    has left of it ends before.
    """
    yield
    if request.path.parent.name == "optimizer" or request.path.stem.endswith("offload_adamw"):
        gc.collect()
    assert _subject(request.path) == "unit" or end_workers() == []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that need a CUDA device where there is none, before their fixtures."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and a torch that was built for it")
