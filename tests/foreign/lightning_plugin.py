"""pytest plugin for Lightning's own tests: they train under `ZenFlowStrategy`, and their results are written to a file.

- A Trainer that Lightning would give its `SingleDeviceStrategy` on the CPU (no strategy, one device) gets `ZenFlowStrategy`, with S = 1 and
  d = 0, so that results do not depend on measured times. It keeps its samplers, which Lightning replaces for distributed strategies.
- `DeepSpeedStrategy`, its names in Lightning's registry included, is `ZenFlowStrategy`.
- Where the tests load a checkpoint as a file, they get what Lightning has saved in the folder.
- `torch.optim.SGD`, which most of these tests train with, makes an AdamW with the same learning rate: ZenFlow's worker computes no SGD.

Lightning's classes are replaced where its tests look for them; Lightning itself is unchanged. Private names are those of Lightning 2.6.
"""

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

# As in tests/conftest.py: set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed.ops
import lightning.pytorch.strategies as strategies
import torch
from lightning.fabric.utilities import cloud_io
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy

FOLDER = "tests_pytorch/"
KEYS: dict[str, Any] = {"update_interval": 1, "publish_lag": 0, "worker_cores": 1, "worker_timeout": 100}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that `lightning_suite` gives."""
    parser.addoption("--own-strategies", action="store_true", help="replace nothing")
    parser.addoption("--only", type=Path, help="file with the names of the tests to run")
    parser.addoption("--results", type=Path, help="file for one JSON object a test")


def pytest_configure(config: pytest.Config) -> None:
    """Replaces classes before any of Lightning's tests is imported."""
    # Of pytest-rerunfailures, which is not needed.
    config.addinivalue_line("markers", "flaky: may be repeated")
    if not config.getoption("--own-strategies"):
        substitute()
    results = config.getoption("--results")
    # With xdist, the process that started the others gets all reports.
    if results is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(results))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of `--only`; a name that is not among those collected is no error."""
    only = config.getoption("--only")
    if only is not None:
        names = frozenset(only.read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if item.nodeid.partition(FOLDER)[2] in names]


def substitute() -> None:
    """Puts `ZenFlowStrategy` and AdamW in the places of Lightning's strategies and of SGD."""
    # On a CPU, DeepSpeed looks for compilers for every engine.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    choose = _AcceleratorConnector._choose_strategy

    @wraps(choose)
    def choose_zenflow(connector: Any) -> Any:
        chosen = choose(connector)
        if type(chosen) is not SingleDeviceStrategy or chosen.root_device.type != "cpu":
            return chosen
        connector.use_distributed_sampler = False
        return ZenFlowStrategy(**KEYS)

    _AcceleratorConnector._choose_strategy = choose_zenflow  # type: ignore[method-assign]
    for entry in StrategyRegistry.values():
        if entry["strategy"] is strategies.DeepSpeedStrategy:
            entry["strategy"] = ZenFlowStrategy
    for module in (strategies, strategies.deepspeed):
        vars(module)["DeepSpeedStrategy"] = ZenFlowStrategy
    vars(torch.optim)["SGD"] = AdamWForSGD
    vars(torch)["load"] = reads_folders(torch.load)
    # They open the path themselves.
    vars(saving)["pl_load"] = vars(cloud_io)["_load"] = reads_folders(cloud_io._load)


def reads_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    """A function that loads a checkpoint from a file, or from a folder of DeepSpeed's.

    Args:
        load: loads it from a file.
    """

    @wraps(load)
    def load_either(path: Any, *args: Any, **kwargs: Any) -> Any:
        file = Path(path, "checkpoint", "mp_rank_00_model_states.pt") if isinstance(path, str | os.PathLike) else None
        if file is None or not file.is_file():
            return load(path, *args, **kwargs)
        state = load(file, weights_only=False)
        return {**state, "state_dict": state["module"]}

    return load_either


class IsAdamW(type):
    """Lets `isinstance` take what `AdamWForSGD` makes."""

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.AdamW)


class AdamWForSGD(metaclass=IsAdamW):
    """An AdamW with the arguments of SGD; the momentum is beta1."""

    # Replaced by tests, which count calls.
    step, zero_grad = torch.optim.AdamW.step, torch.optim.AdamW.zero_grad

    def __new__(cls, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0, **_: Any) -> Any:
        """Makes the optimizer, of torch's class."""
        return torch.optim.AdamW(params, lr=lr, betas=(momentum or 0.9, 0.999), weight_decay=weight_decay)


class Results:
    """Writes a test's phases that did not pass, and its end.

    Args:
        path: the file; appended to, so that what a killed process did is not lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of a test: setup, call and teardown."""
        if report.passed and report.when != "call":
            return
        # The part of a traceback that pytest marks with E, or what is said where there is none.
        lines = report.longreprtext.splitlines()
        error = " ".join(line[1:].strip() for line in lines if line.startswith("E ")) or " ".join(lines[-1:])
        if isinstance(report.longrepr, tuple):
            error = report.longrepr[2]
        outcome = {"nodeid": report.nodeid, "when": report.when, "outcome": report.outcome, "error": error}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
