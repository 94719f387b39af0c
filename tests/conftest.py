"""Set-up of all tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The models are tiny and the worker's cores are the trainer's: threads that wait for each other actively only slow one another down.
# Set before torch is imported; where it is not set, Lightning chooses more.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Read when Triton is imported, which Lightning does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where tests leave what documents show."""
    parser.addoption("--screenshot", metavar="FILE.png", help="where `-m browser` writes its screenshot of TensorBoard")


DOCS = {"test_readme.py", "test_recipes.py", "test_release.py"}
"""Of tests/examples."""


def _subject(path: Path) -> str | None:
    """The marker of a test file that is no part of the package's promises, or that is pure."""
    folder = path.relative_to(Path(__file__).parent).parts[0]
    if folder == "examples":
        return "docs" if path.name in DOCS else "examples"
    return folder if folder in ("benchmarks", "unit") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by subject, and groups them for `--dist=loadgroup`.

    A file stays in one process, which keeps what its tests share. Those that start ranks share one process, which keeps their server;
    they come first, since they take longest, and unit tests last, so that all processes end at nearly the same time.
    """
    order = {"ranks": 0, "": 1, "unit": 2}
    places = {}
    for item in items:
        subject = _subject(item.path)
        if subject is not None and not {"browser", "gpu", "slow"} & {*item.keywords}:
            item.add_marker(subject)
        on_ranks = hasattr(getattr(item, "module", None), "run_on_ranks")
        item.add_marker(pytest.mark.xdist_group("ranks" if on_ranks else item.path.stem))
        places[item] = order["ranks" if on_ranks else "unit" if subject == "unit" else ""]
    items.sort(key=places.__getitem__)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes with one thread, whatever the test before has left: with more, tests of small models take a hundred times as long
    beside other processes."""
    torch.set_num_threads(1)


@pytest.fixture
def no_worker_is_left() -> Iterator[None]:
    """Fails a test after which a worker process of this process remains."""
    from harness import workers  # imports torch and DeepSpeed, which not every test needs

    yield
    assert workers() == []


@pytest.fixture
def fp16_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks for the CPU's fast instructions; torch computes in fp16 without them, slowly, which is enough here."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # takes seconds, which not every test needs

    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)


@pytest.fixture(scope="session")
def needs_cuda() -> None:
    """Skips tests where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and a torch that was built for it")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium, as a driver of Selenium's."""
    from selenium import webdriver

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(programs.values()), f"{programs}: install Debian's packages chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless=new", "--no-sandbox", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    service = webdriver.ChromeService(str(programs["chromedriver"]))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()
